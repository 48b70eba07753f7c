"""A compilation after warm-up is an error that names what was compiled."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_moe_jax import LateCompileError
from lora_moe_jax.serving.compile_guard import compile_count, no_compile
from lora_moe_jax.serving.step_batch import StepBatch


def triple_everything(x):
    return x * 3


def test_a_late_compilation_is_named():
    function = jax.jit(triple_everything)
    inputs = [np.zeros(size, np.float32) for size in (3, 4)]
    before = compile_count()
    with pytest.raises(LateCompileError, match="serving tea compiled .*triple_everything"):
        with no_compile("serving tea"):
            function(inputs[0])
    assert compile_count() > before
    count = compile_count()
    with no_compile("the same shape"):
        function(inputs[0])
    assert compile_count() == count
    with pytest.raises(LateCompileError, match="triple_everything"):
        with no_compile("another shape"):
            function(inputs[1])


def test_another_error_inside_comes_out_as_it_is():
    with pytest.raises(ZeroDivisionError), no_compile("dividing"):
        jax.jit(lambda x: x + 41)(np.zeros(5, np.float32))
        raise ZeroDivisionError


def test_other_threads_may_compile():
    def compile_something():
        jax.jit(lambda x: jnp.sin(x) + 17)(np.zeros(6, np.float32)).block_until_ready()

    before = compile_count()
    with no_compile("waiting"):
        thread = threading.Thread(target=compile_something)
        thread.start()
        thread.join()
    assert compile_count() > before


def test_a_step_of_another_size_is_refused(engine):
    one = engine("deepseek_v3")
    packed = np.zeros(one._runner.steps.layout.size(5), np.int32)
    with pytest.raises(LateCompileError, match=r"step\[5\].*step\[8\]"):
        one._runner.steps.run(StepBatch(packed, 5, 1, False, False, [], 0))
