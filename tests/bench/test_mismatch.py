"""`bench mismatch` on a model small enough for a CPU."""

from __future__ import annotations

import numpy as np
import pytest

from lora_moe_jax.bench import mismatch
from lora_moe_jax.bench.mismatch import Load
from lora_moe_jax.bench.report import read_report
from lora_moe_jax.cli import main
from tests.bench.test_serving import small_config


@pytest.mark.slow
def test_a_small_model(tmp_path, capsys):
    small_config(tmp_path)
    file = tmp_path / "mismatch.json"
    command = f"bench mismatch --model {tmp_path} --json {file} --dtype float32 --rank 4"
    sizes = "--tokens 30 --requests 3 --prompt 9 --output 5 --adapters 2"
    assert main([*command.split(), *sizes.split()]) == 0
    generated, scored = read_report(file).sections["mismatch"]
    assert generated.tokens == 30 < scored.tokens
    for row in (generated, scored):
        assert row.largest == row.mean == row.differing == row.outside == 0
    assert "equal bits" in capsys.readouterr().out
    assert main(["bench", "show", str(file)]) == 0


def test_what_is_counted(tmp_path):
    parts = [np.array([0, np.log(1.2)], np.float32), np.array([-0.05, 0], np.float32)]
    row = mismatch._row("m", small_config(tmp_path), Load(4, 1, 2, 2, 1), 4, "score", parts)
    assert row.tokens == 4 and row.differing == 0.5 and row.outside == 0.25
    assert row.largest == pytest.approx(np.log(1.2), rel=1e-6)
    assert row.mean == pytest.approx((np.log(1.2) + 0.05) / 4, rel=1e-6)
