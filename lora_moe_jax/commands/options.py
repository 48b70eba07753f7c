"""Options of several commands, and what they stand for."""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_moe_jax.errors import ConfigError, RequestError
from lora_moe_jax.parallel.mesh import SUPPORTED_AXES
from lora_moe_jax.pocket import ADAPTERS, BASE

MODEL_HELP = "Hugging Face model folder, or 'pocket' for the model that comes with the package"
MESH_HELP = "devices to split the model over, as expert=2,tensor=4; default: one device"
DTYPE_HELP = "of the model (default: float32 on a CPU, else bfloat16)"
MAX_RANK_HELP = "the largest rank of an adapter (default 32)"
ADAPTER_HELP = "an adapter to load; may be repeated. For 'pocket', a bare name of its adapters"


def model_folder(model: str) -> Path:
    """What `--model` names."""
    return BASE if model == "pocket" else Path(model)


def check_tokenizer(folder: Path) -> None:
    """Raises ConfigError for a model that has no tokenizer, before it is loaded."""
    from lora_moe_jax.serving.text import TOKENIZER_FILE

    if not (folder / TOKENIZER_FILE).is_file():
        raise ConfigError(
            "the command needs the model's tokenizer",
            file=folder,
            key=TOKENIZER_FILE,
            expected="a model folder with a tokenizer",
            found="none",
        )


def add_adapter_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=FOLDER", help=ADAPTER_HELP
    )


def adapter_folders(options: argparse.Namespace) -> dict[str, Path]:
    """The folders that `--adapter` names, by name.

    Raises:
      RequestError: one is neither NAME=FOLDER nor an adapter of the pocket model; or a name is
        there twice.
    """
    pairs = [_adapter_folder(item, options.model) for item in options.adapter]
    folders = dict(pairs)
    if len(folders) < len(pairs):
        raise RequestError(
            "two adapters have one name",
            key="--adapter",
            expected="a name of its own for each",
            found=", ".join(name for name, _ in pairs),
        )
    return folders


def _adapter_folder(item: str, model: str) -> tuple[str, Path]:
    name, _, folder = item.partition("=")
    if name and folder:
        # Before a model is loaded. What is in it is read once there is one.
        if not Path(folder).is_dir():
            raise RequestError(
                "an adapter's folder is not there",
                file=folder,
                key="--adapter",
                expected="a folder with adapter_config.json",
            )
        return name, Path(folder)
    if model == "pocket" and name in ADAPTERS:
        return name, ADAPTERS[name]
    raise RequestError(
        "--adapter needs a name and a folder",
        key="--adapter",
        expected="NAME=FOLDER" + (f", or one of {sorted(ADAPTERS)}" if model == "pocket" else ""),
        found=item,
    )


def ranks(text: str) -> int | dict[int, int]:
    """An option's type: the rank of every slot, or RANK:SLOTS for each, with commas."""
    if text.isdecimal():
        return int(text)
    pairs = [part.partition(":")[::2] for part in text.split(",")]
    if not all(rank.isdecimal() and slots.isdecimal() for rank, slots in pairs):
        raise argparse.ArgumentTypeError(f"expected RANK or RANK:SLOTS,RANK:SLOTS, found {text}")
    found = {int(rank): int(slots) for rank, slots in pairs}
    if len(found) < len(pairs):
        raise argparse.ArgumentTypeError(f"expected each RANK once in RANK:SLOTS, found {text}")
    return found


def add_mesh_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mesh", type=mesh_sizes, metavar="AXIS=DEVICES,...", help=MESH_HELP)


def add_dtype_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help=DTYPE_HELP)


def dtype_of(options: argparse.Namespace) -> str:
    """What `--dtype` says, or what suits the platform: its kernels are for bfloat16."""
    import jax

    return options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")


def mesh_sizes(text: str) -> dict[str, int]:
    """An option's type: how many devices there are along each axis of a mesh."""
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    found = {axis: int(size) for axis, size in pairs if axis in SUPPORTED_AXES and size.isdecimal()}
    if len(found) < len(pairs) or not all(found.values()):
        axes = " or ".join(f"{axis}=DEVICES" for axis in sorted(SUPPORTED_AXES))
        raise argparse.ArgumentTypeError(f"expected {axes}, or both with a comma, found {text}")
    return found


def positive(text: str) -> int:
    """An option's type: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, found {text}")
    return int(text)


def natural(text: str) -> int:
    """An option's type: an integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected an integer of at least 0, found {text}")
    return int(text)
