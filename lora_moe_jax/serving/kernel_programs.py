"""The Mosaic kernels of a lowered step as programs of their own, to be compiled side by side.

XLA compiles the kernels of one program one after the other, which is most of its time. It keeps
each for the whole process, by its hash, and so finds those that other programs have brought
(measured, JAX 0.11.2, two layers of Qwen3-30B-A3B: of 28 s for a step of 32 tokens, and of 64 s
for one of 4096, 20 s and 50 s were its 14 kernels).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir

TARGET, CONFIG = "mosaic_gpu_v2", "mhlo.backend_config"


def compile_kernels(lowered: jax.stages.Lowered, threads: Executor) -> None:
    """Begins to compile the kernels of a lowered program, the last first: where threads are few,
    the compiler itself has come to the first by then.

    One that cannot be compiled says so when the program is.
    """
    for program in reversed(kernel_programs(lowered)):
        threads.submit(lambda program=program: program.lower().compile())


def kernel_programs(lowered: jax.stages.Lowered) -> list[jax.stages.Wrapped]:
    """A program for each kernel of a lowered one, in its order; they can be compiled, not run."""
    return [
        _program({entry.name: _value(entry.attr) for entry in call.attributes[CONFIG]})
        for call in _kernel_calls(lowered.compiler_ir("stablehlo").operation)
    ]


def _kernel_calls(operation: ir.Operation) -> Iterator[ir.Operation]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                if _is_kernel(inner.operation):
                    yield inner.operation
                yield from _kernel_calls(inner.operation)


def _is_kernel(operation: ir.Operation) -> bool:
    return (
        operation.name == "stablehlo.custom_call"
        and operation.attributes["call_target_name"].value == TARGET
    )


def _value(attribute: ir.Attribute) -> bool | bytes:
    # Neither a hash nor a module is text.
    return attribute.value if isinstance(attribute, ir.BoolAttr) else attribute.value_bytes


def _program(attributes: dict[str, bool | bytes]) -> jax.stages.Wrapped:
    """A kernel is compiled from its attributes alone: without a run there are no operands."""

    def kernel():
        return jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((), jnp.int32))(**attributes)

    return jax.jit(kernel)
