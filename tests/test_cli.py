"""The command line: help of every command, what `inspect` shows, and bad input."""

from __future__ import annotations

import argparse
import shutil

import jax
import pytest

import lora_moe_jax
from lora_moe_jax.cli import main
from lora_moe_jax.commands import demo
from lora_moe_jax.commands.options import dtype_of, mesh_sizes, ranks
from lora_moe_jax.pocket import ADAPTERS, BASE
from lora_moe_jax.serving import engine
from lora_moe_jax.serving import options as serving_options
from lora_moe_jax.serving.engine import Engine


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["demo"],
        ["generate"],
        ["score"],
        ["serve"],
        ["train"],
        ["rl"],
        ["inspect"],
        ["bench"],
        ["bench", "kernels"],
        ["bench", "serving"],
        ["bench", "training"],
        ["bench", "mismatch"],
        ["bench", "show"],
    ],
)
def test_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    assert " ".join(["usage: lora-moe-jax", *command]) in capsys.readouterr().out


def test_ranks_of_slots(capsys):
    assert (ranks("16"), ranks("16:6,64:2")) == (16, {16: 6, 64: 2})
    for text in ("16:6,64", "x", "16:", ":2", "", "16:2,16:3"):
        with pytest.raises(SystemExit):
            main(["serve", "--max-rank", text])
        assert "RANK:SLOTS" in capsys.readouterr().err


@pytest.mark.parametrize("platform, dtype", [("cpu", "float32"), ("gpu", "bfloat16")])
def test_the_dtype_is_what_a_platform_has_kernels_for(monkeypatch, platform, dtype):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert dtype_of(argparse.Namespace(dtype=None)) == dtype
    assert dtype_of(argparse.Namespace(dtype="float32")) == "float32"


def test_sizes_of_a_mesh(capsys):
    assert mesh_sizes("tensor=4") == {"tensor": 4}
    assert mesh_sizes("expert=2,tensor=4") == {"expert": 2, "tensor": 4}
    for text in ("tensr=2", "tensor", "tensor=0", "tensor=x", "", "tensor=2,tensor=2"):
        with pytest.raises(SystemExit):
            main(["serve", "--mesh", text])
        assert "expected expert=DEVICES or tensor=DEVICES" in capsys.readouterr().err


def test_a_mesh_of_more_devices_than_there_are(capsys):
    assert main(["generate", "--prompt", "x", "--mesh", "tensor=1000"]) == 2
    message = capsys.readouterr().err
    assert "the mesh has more devices than there are" in message and "1000" in message
    assert "JAX_NUM_CPU_DEVICES" in message


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"lora-moe-jax {lora_moe_jax.__version__}\n"


def test_inspect(capsys):
    assert main(["inspect", str(ADAPTERS["prose"])]) == 0
    assert "packed" in capsys.readouterr().out
    assert main(["inspect", str(BASE)]) == 0
    of_folder = capsys.readouterr().out
    assert "deepseek_v3" in of_folder
    assert main(["inspect", "pocket"]) == 0
    assert capsys.readouterr().out == of_folder


def test_inspect_takes_names_as_they_are(capsys, tmp_path):
    """Those that look like markup, too; and an adapter with its base's config.json beside it."""
    folder = shutil.copytree(ADAPTERS["prose"], tmp_path / "a[red]" / "b[/x]")
    shutil.copy(BASE / "config.json", folder)
    assert main(["inspect", str(folder)]) == 0
    shown = "".join(capsys.readouterr().out.split())
    assert "packed" in shown and "a[red]/b[/x]" in shown


def test_score_shows_text_as_it_is(capsys):
    assert main(["score", "--text", "x[/a:b:c] = [red]"]) == 0
    assert "x[/a:b:c] = [red]" in capsys.readouterr().out


def test_generate_shows_text_as_it_is(capsys):
    """Neither emoji nor folds in lines, and tabs are tabs."""
    prompt = "y = x[a:b:c]\n\t[red]# " + "long " * 30
    assert main(["generate", "--prompt", prompt, "--max-tokens", "1"]) == 0
    assert prompt in capsys.readouterr().out


@pytest.mark.parametrize(
    "command, most",
    [
        (["generate", "--prompt", "long", "--max-tokens", "512"], "at most 512"),
        (["generate", "--prompt", "long", "--max-tokens", "9", "--max-length", "9"], "at most 9"),
        (["score", "--text", "word " * 600], "at most 512"),
        (["score", "--text", "more than three", "--max-length", "3"], "at most 3"),
    ],
)
def test_a_text_that_is_too_long_is_refused_before_weights(capsys, monkeypatch, command, most):
    monkeypatch.setattr(Engine, "from_pretrained", None)  # cannot be called
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "too long" in error and most in error


def test_a_text_has_the_room_that_it_needs(capsys, monkeypatch):
    """With a default of 4 tokens, more than that are generated all the same."""
    monkeypatch.setattr(serving_options, "DEFAULT_MAX_LENGTH", 4)
    assert main(["generate", "--prompt", "def f(x):", "--max-tokens", "9"]) == 0
    assert "base · length" in capsys.readouterr().out


def test_a_module_that_is_not_there_is_refused_before_weights(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(engine, "load_model", None)  # cannot be called
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    command = ["train", "--data", str(data), "--out", str(tmp_path / "out")]
    assert main([*command, "--target-modules", "o_proj", "--target-modules", "nope"]) == 2
    error = capsys.readouterr().err
    assert "nope" in error and "'o_proj'" in error and not (tmp_path / "out").exists()


def test_an_interrupt_is_one_line_and_status_130(capsys, monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert main(["demo"]) == 130
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "interrupted\n")


def test_a_model_that_is_not_there(capsys, tmp_path):
    assert main(["score", "--model", str(tmp_path / "Qwen:m:"), "--text", "x"]) == 2
    error = capsys.readouterr().err
    assert "no such model folder" in error and "Qwen:m:" in error and "not downloaded" in error


def test_bad_input_is_one_message_and_status_2(capsys, tmp_path):
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
    error = capsys.readouterr().err
    assert "no such folder" in error and "found: nothing" in error
    assert main(["inspect", __file__]) == 2
    assert "found: a file" in capsys.readouterr().err
    assert main(["inspect", str(ADAPTERS["tester"]), "--max-rank", "4"]) == 2
    error = capsys.readouterr().err
    assert "AdapterError" in error and "--model" in error
    assert main(["generate", "--prompt", "x", "--use", "nobody"]) == 2
    assert "--use" in capsys.readouterr().err
    folder = ADAPTERS["prose"]
    for adapters in ([f"base={folder}"], ["prose", f"prose={folder}"]):
        arguments = [part for its in adapters for part in ("--adapter", its)]
        assert main(["generate", "--prompt", "x", *arguments]) == 2
        assert "--adapter" in capsys.readouterr().err
    for option, value in (("--max-rank", "0"), ("--max-adapters", "-1")):
        with pytest.raises(SystemExit) as end:
            main(["inspect", str(BASE), option, value])
        assert end.value.code == 2
    with pytest.raises(SystemExit):
        main(["inspect", str(BASE), "--max-rank", "-1"])
