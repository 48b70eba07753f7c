"""A lowered program's kernels apart: all of them, and compiled before the program comes to it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from lora_moe_jax.bench.lowering import default_target
from lora_moe_jax.serving.kernel_programs import kernel_programs
from pallas_kernels import lora_matmul
from tests.pallas_kernels.gpu_compile import SETTINGS, h200

if jax.__version_info__ < (0, 11):
    pytest.skip("the Mosaic GPU kernels need jax >= 0.11", allow_module_level=True)

# What ptxas says of a kernel, once for each that is compiled.
PTXAS = "bytes spill stores"


def products(x, square, wide):
    for w in (square, wide):
        x = lora_matmul(x, w, implementation="mosaic_gpu")
    return x


def shapes(place=lambda array: array):
    sizes = (16, 64), (64, 64), (128, 64)
    return [place(jax.ShapeDtypeStruct(size, jnp.bfloat16)) for size in sizes]


def hashes(lowered) -> list[str]:
    return re.findall(r'kernel_hash = ("(?:[^"\\]|\\.)*")', lowered.as_text())


def test_every_kernel():
    target = default_target()
    with target.context():
        lowered = jax.jit(products).trace(*shapes()).lower(lowering_platforms=("cuda",))
        found = [
            program.trace().lower(lowering_platforms=("cuda",))
            for program in kernel_programs(lowered)
        ]
    whole = hashes(lowered)
    assert len(set(whole)) == 2
    assert [hashes(program) for program in found] == [[one] for one in whole]


def test_a_program_without_kernels():
    lowered = jax.jit(lambda x: jnp.sort(x @ x)).lower(jnp.ones((8, 8)))
    assert kernel_programs(lowered) == []


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None
    or importlib.util.find_spec("jax_plugins.xla_cuda13") is None,
    reason="jax-cuda13-plugin and jax-cuda13-pjrt are not installed (aot extra)",
)
def test_the_compiler_finds_them():
    run = subprocess.run(
        [sys.executable, "-m", "tests.serving.test_kernel_programs"],
        cwd=Path(__file__).parents[2],
        env=os.environ | SETTINGS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    apart, whole = run.stdout.split("KERNELS ARE COMPILED\n")
    assert apart.count(PTXAS) == 2 and whole.count(PTXAS) == 0, run.stdout


def main():
    """Compiles the kernels for an H200, then the program that has them."""
    mesh, here, placed = h200()
    jax.default_backend = lambda: "gpu"  # where kernels are functions of their own
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(products, out_shardings=here).trace(*shapes(placed)).lower()
        for program in kernel_programs(lowered):
            jax.jit(program, out_shardings=here).trace().lower().compile()
        print("KERNELS ARE COMPILED", flush=True)
        lowered.compile()


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    main()
