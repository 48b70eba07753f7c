"""Makes the pocket model, its adapters and their reference logits; README.md says how."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from adapters import HABITS, train_adapter
from base import train_base
from golden import write_golden
from sample import print_samples
from text import load

ROOT = Path(__file__).resolve().parents[2]
POCKET = ROOT / "lora_moe_jax" / "pocket"
GOLDEN = ROOT / "tests" / "golden" / "pocket.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+", choices=["base", *HABITS, "golden", "sample"])
    parser.add_argument("--steps", type=int, default=4400, help="training steps of the base")
    parser.add_argument("--adapter-steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=POCKET)
    parser.add_argument("--golden", type=Path, default=GOLDEN)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the same sums in the same order on every machine
    styles = load()
    if "base" in args.stages:
        train_base(styles, args.out / "base", args.steps, args.seed)
    for name in HABITS:
        if name in args.stages:
            train_adapter(name, styles, args.out, args.adapter_steps, args.seed)
    if "golden" in args.stages:
        write_golden(styles, args.out, args.golden)
    if "sample" in args.stages:
        print_samples(args.out, args.seed)


if __name__ == "__main__":
    main()
