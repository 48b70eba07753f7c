"""Training on a file: what is read from it, in which order, what is learned, what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lora_moe_jax import AdapterError, RequestError, read_adapter
from lora_moe_jax.cli import main
from lora_moe_jax.commands.console import plain_console
from lora_moe_jax.pocket import BASE
from lora_moe_jax.serving.text import TextCodec
from lora_moe_jax.strict_json import parse_json_object
from lora_moe_jax.training import (
    DataOrder,
    Example,
    LoraConfig,
    SftConfig,
    read_examples,
    run_sft,
    sft_command,
)
from lora_moe_jax.training.curve import sparkline
from lora_moe_jax.training.sft import SftReport, batches, count_steps
from tests.adapters.tables import GOLDEN, table
from tests.training.helpers import same, state

END = 1
CHAT = [
    {"role": "user", "content": "Explain import."},
    {"role": "assistant", "content": "It imports."},
    {"role": "user", "content": "More."},
    {"role": "assistant", "content": "It imports more."},
]
GOOD = '{"text": "fine"}\n'


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.from_folder(BASE)


def examples(count: int = 12) -> list[Example]:
    found = []
    for i in range(count):
        rng = np.random.default_rng([7, i])
        length = int(rng.integers(4, 30))
        found.append(Example(rng.integers(2, 250, length).tolist(), length // 2))
    return found


def test_the_order_has_everything_once_an_epoch():
    order = DataOrder(5, seed=3)
    taken = [order.take() for _ in range(10)]
    assert sorted(taken[:5]) == sorted(taken[5:]) == list(range(5))
    assert taken[:5] != taken[5:] and order.epochs == 2
    assert [DataOrder(5, seed=4, taken=i).peek() for i in range(10)] != taken


def test_the_order_goes_on_from_its_fields():
    order = DataOrder(7, seed=1)
    taken = [order.take() for _ in range(30)]
    again = DataOrder(7, seed=1)
    for _ in range(11):
        again.take()
    again = DataOrder(**json.loads(json.dumps(dataclasses.asdict(again))))
    assert [again.take() for _ in range(19)] == taken[11:]


def test_batches():
    data, config = examples(), SftConfig(epochs=2, batch_tokens=40)
    order = DataOrder(len(data), seed=5)
    found = list(batches(data, order, config))
    assert order.epochs == 2 and count_steps(data, DataOrder(len(data), 5), config) == len(found)
    first = [one for batch in found for one in batch][: len(data)]
    assert sorted(map(id, first)) == sorted(map(id, data))
    sizes = [sum(len(one.tokens) for one in batch) for batch in found]
    assert max(sizes) <= 40 and np.mean(sizes) > 20
    taken = len(found[0]) + len(found[1])
    assert list(batches(data, DataOrder(len(data), 5, taken), config)) == found[2:]
    # A step's examples are of one epoch, however many tokens it may have.
    for large in (SftConfig(epochs=3, batch_tokens=10**6), SftConfig(steps=3, batch_tokens=10**6)):
        epochs = list(batches(data, DataOrder(len(data)), large))
        assert [sorted(map(id, its)) for its in epochs] == [sorted(map(id, data))] * 3
    tiny = SftConfig(steps=5, batch_tokens=1)
    assert [len(batch) for batch in batches(data, DataOrder(len(data)), tiny)] == [1] * 5


def test_forms_of_examples(codec, tmp_path):
    file = tmp_path / "data.jsonl"
    lines = [{"prompt": "def f", "completion": "(x):"}, {"text": "import os"}, {"messages": CHAT}]
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    pair, text, first, second = read_examples(file, codec, END, 512)
    answer = codec.encode("(x):", special_tokens=False)
    assert pair == Example([*codec.encode("def f"), *answer, END], len(answer) + 1)
    whole = [*codec.encode("import os"), END]
    assert text == Example(whole, len(whole) - 1)
    for found, turn in ((first, 1), (second, 3)):
        said = codec.encode(CHAT[turn]["content"], special_tokens=False)
        assert found == Example([*codec.chat(CHAT[:turn]), *said, END], len(said) + 1)
    # The second has the first within it, as the model's template writes it.
    assert second.tokens[: len(first.tokens)] == first.tokens


BAD = [
    ("{", None),
    ("[1]", None),
    ('{"text": "a", "text": "b"}', "text"),
    ('{"text": "a", "prompt": "b"}', None),
    ('{"prompt": "a"}', None),
    ('{"text": 3}', "text"),
    ('{"text": null}', "text"),
    ('{"prompt": "a", "completion": ["b"]}', "completion"),
    ('{"messages": "hello"}', "messages"),
    ('{"messages": [1]}', "messages"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "messages"),
    ('{"messages": [{"role": "assistant"}]}', "messages[0].content"),
    ('{"messages": [{"content": "a"}]}', "messages[0].role"),
    ('{"text": "\\ud800"}', None),
    ('{"text": NaN}', None),
    (json.dumps({"text": "long " * 600}), None),
    ("[" * 100_000, None),
    ("\xff", None),
]


@pytest.mark.parametrize("line, key", BAD)
def test_bad_lines_are_named(codec, tmp_path, line, key):
    file = tmp_path / "data.jsonl"
    file.write_bytes((GOOD + "\n").encode() + line.encode("latin-1") + b"\n" + GOOD.encode())
    with pytest.raises(RequestError) as caught:
        read_examples(file, codec, END, 512)
    assert caught.value.file == f"{file}:3" and caught.value.key == key


def test_a_file_may_begin_as_windows_writes_it(codec, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text(GOOD * 2, encoding="utf-8-sig")
    assert len(read_examples(file, codec, END, 64)) == 2


def test_bad_files(codec, tmp_path):
    (tmp_path / "empty").write_text("\n\n")
    for name in ("empty", "nothing", ".", "\0"):
        with pytest.raises(RequestError):
            read_examples(tmp_path / name, codec, END, 512)
    (tmp_path / "chat").write_text(json.dumps({"messages": CHAT}))
    plain = TextCodec(codec.tokenizer, None, {})
    with pytest.raises(RequestError, match="template") as caught:
        read_examples(tmp_path / "chat", plain, END, 512)
    assert caught.value.file == f"{tmp_path / 'chat'}:1"
    (tmp_path / "nothing to learn").write_text('{"prompt": "a", "completion": ""}')
    with pytest.raises(RequestError, match="nothing to learn"):
        read_examples(tmp_path / "nothing to learn", codec, None, 512)


def test_losses_fall_and_every_bit_is_repeated(pair):
    engine, trainer = pair()
    data, config = examples(), SftConfig(epochs=6, batch_tokens=100, learning_rate=0.02)

    def run(seed: int):
        trainer.add_adapter("a", LoraConfig(rank=4, alpha=8))
        order = DataOrder(len(data), seed)
        reports = list(run_sft(trainer, "a", data, config, order))
        found = reports, state(trainer, engine, "a")
        trainer.remove_adapter("a")
        engine.unload_adapter("a")
        return found

    reports, values = run(0)
    losses = [report.loss for report in reports]
    assert np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])
    assert [report.step for report in reports] == list(range(1, len(reports) + 1))
    assert reports[-1].epochs == 6
    again, repeated = run(0)
    assert again == reports and same(values, repeated)
    other, _ = run(1)
    assert other != reports


def test_a_run_begins_without_a_gradient(pair):
    engine, trainer = pair()
    data, config, norms = examples(4), SftConfig(batch_tokens=10**6), []
    for failed in (False, True):
        trainer.add_adapter("a", LoraConfig(rank=1))
        if failed:
            run = run_sft(
                trainer, "a", data, dataclasses.replace(config, learning_rate=lambda steps: np.nan)
            )
            with pytest.raises(RequestError, match="out of range"):
                next(run)
        norms.append(next(run_sft(trainer, "a", data, config)).gradient_norm)
        trainer.remove_adapter("a")
        engine.unload_adapter("a")
    assert norms[0] == norms[1] > 0


def test_the_loss_is_a_mean_over_what_is_learned(pair):
    engine, trainer = pair()
    trainer.add_adapter("a", LoraConfig(rank=1))
    data = examples(4)
    report = next(run_sft(trainer, "a", data, SftConfig(batch_tokens=10**6)))
    scores = engine.score([example.tokens for example in data])
    learned = np.concatenate(
        [s.logprobs[-example.learned :] for s, example in zip(scores, data, strict=True)]
    )
    assert report.learned == len(learned)
    np.testing.assert_allclose(report.loss, -learned.mean(), rtol=1e-6)


def test_bad_runs_are_refused_at_once(pair):
    engine, trainer = pair()
    trainer.add_adapter("a", LoraConfig(rank=1))
    data = examples(3)
    for key in ("steps", "epochs", "batch_tokens"):
        with pytest.raises(RequestError) as caught:
            run_sft(trainer, "a", data, SftConfig(**{key: 0}))
        assert caught.value.key == key
    for key, value in (
        ("learning_rate", -1),
        ("learning_rate", float("nan")),
        ("weight_decay", -1),
        ("clip_norm", "no"),
    ):
        with pytest.raises(RequestError) as caught:
            run_sft(trainer, "a", data, SftConfig(**{key: value}))
        assert caught.value.key == key
    with pytest.raises(RequestError, match="order"):
        run_sft(trainer, "a", data, order=DataOrder(4))
    with pytest.raises(RequestError):
        run_sft(trainer, "a", [])
    with pytest.raises(AdapterError, match="in training"):
        run_sft(trainer, "b", data)


def test_sparkline():
    assert sparkline([0, 1, 2, 7]) == "▁▂▃█"
    assert sparkline([3.0, 3.0]) == "▁▁" and sparkline([]) == ""
    assert sparkline([0, 0, 1, 1], width=2) == "▁█"
    assert sparkline([float("nan"), 1, 2]) == " ▁█"


@pytest.fixture
def folder(tmp_path):
    """The smallest golden model with a tokenizer of bytes."""
    folder = shutil.copytree(GOLDEN / "deepseek_v3/base", tmp_path / "model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:250]
    tokens = ["<bos>", "<eos>", *alphabet]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_command(pair, monkeypatch, folder, tmp_path, capsys, whole):
    """`whole` compiles an engine and a trainer; else it runs with those that are there."""
    if not whole:
        engine, trainer = pair()
        monkeypatch.setattr(sft_command.Engine, "from_pretrained", lambda *_, **__: engine)
        monkeypatch.setattr(sft_command, "Trainer", lambda *_, **__: trainer)
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    lines = [{"prompt": "say ", "completion": word * 4} for word in ("ab", "cd", "ef")]
    data.write_text("\n".join(map(json.dumps, lines)))
    command = ["train", "--model", str(folder), "--data", str(data), "--out", str(out)]
    options = ["--rank", "2", "--epochs", "12", "--batch-tokens", "40", "--max-length", "48"]
    assert main([*command, *options, "--learning-rate", "0.03"]) == 0
    shown = capsys.readouterr().out
    assert "loss" in shown and "█" in shown
    written = json.loads((out / "loss.json").read_text())
    losses = [step["loss"] for step in written["steps"]]
    assert written["order"] == {"size": 3, "seed": 0, "taken": 36}
    assert len(losses) == 12 and losses[-1] < 0.8 * losses[0]
    assert read_adapter(out, table("deepseek_v3")).config.r == 2
    assert main([*command, *options]) == 2
    assert "--out" in capsys.readouterr().err


@pytest.fixture
def train(pair, monkeypatch, folder, tmp_path):
    """`train(out, steps)` runs the command with an engine and a trainer that are there."""
    engine, trainer = pair()
    monkeypatch.setattr(sft_command.Engine, "from_pretrained", lambda *_, **__: engine)
    monkeypatch.setattr(sft_command, "Trainer", lambda *_, **__: trainer)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": word * 4}) + "\n" for word in ("ab", "cd", "ef")))

    def run(out: Path, steps: int) -> int:
        command = ["train", "--model", str(folder), "--data", str(data), "--out", str(out)]
        status = main([*command, "--rank", "2", "--batch-tokens", "20", "--steps", str(steps)])
        trainer.remove_adapter(sft_command.NAME)
        engine.unload_adapter(sft_command.NAME)
        return status

    return run


@pytest.mark.parametrize("method", ["forward_backward", "optim_step"])
def test_an_interrupt_saves_whole_steps(pair, train, ctrl_c, monkeypatch, tmp_path, capsys, method):
    """Bits and losses are those of a run that was to have as many steps."""
    _, trainer = pair()
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert train(whole, 3) == 0
    called, calls = getattr(trainer, method), []

    def interrupted(*arguments, **settings):
        calls.append(None)
        if len(calls) == 3:
            ctrl_c()
        return called(*arguments, **settings)

    monkeypatch.setattr(trainer, method, interrupted)
    capsys.readouterr()
    assert train(part, 5000) == 130
    shown = capsys.readouterr()
    assert shown.err == f"interrupted after 3 of 5000 steps; saved in {part}\n"
    assert f"adapter and loss.json are in {part}" in shown.out
    found, expected = (load_file(out / "adapter_model.safetensors") for out in (part, whole))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[key], expected[key]) for key in found)
    assert (part / "loss.json").read_text() == (whole / "loss.json").read_text()


def test_an_interrupt_in_the_first_step_writes_nothing(
    pair, train, ctrl_c, monkeypatch, tmp_path, capsys
):
    _, trainer = pair()
    monkeypatch.setattr(trainer, "forward_backward", lambda *_: ctrl_c())
    assert train(tmp_path / "out", 3) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not (tmp_path / "out").exists()


def test_an_interrupt_while_files_are_written(pair, train, ctrl_c, monkeypatch, tmp_path, capsys):
    _, trainer = pair()
    save_adapter = trainer.save_adapter

    def interrupted(*arguments):
        ctrl_c()
        save_adapter(*arguments)

    monkeypatch.setattr(trainer, "save_adapter", interrupted)
    out = tmp_path / "out"
    assert train(out, 2) == 130
    assert f"adapter and loss.json are in {out}" in capsys.readouterr().out
    assert len(json.loads((out / "loss.json").read_text())["steps"]) == 2


def test_a_training_that_diverges_is_no_success(pair, monkeypatch, folder, tmp_path, capsys):
    engine, trainer = pair()
    monkeypatch.setattr(sft_command.Engine, "from_pretrained", lambda *_, **__: engine)
    monkeypatch.setattr(sft_command, "Trainer", lambda *_, **__: trainer)
    data, out = tmp_path / "data.jsonl", tmp_path / "x:b:y"
    data.write_text('{"text": "abcd"}\n' * 2)
    command = ["train", "--model", str(folder), "--data", str(data), "--out", str(out)]
    assert main([*command, "--rank", "2", "--steps", "3", "--learning-rate", "1e38"]) == 2
    error = capsys.readouterr().err
    assert "diverged" in error and "--learning-rate" in error and f"{out}/loss.json" in error
    steps = parse_json_object((out / "loss.json").read_bytes(), out, RequestError)["steps"]
    assert [step["skipped"] for step in steps] == [False, True, True]
    assert steps[-1]["loss"] is None and (out / "adapter_model.safetensors").exists()


def test_steps_that_were_skipped_are_said(capsys, tmp_path):
    steps = [SftReport(1, 2.0, 8, 7, 1.0, 0.5, skipped) for skipped in (False, True, False)]
    sft_command._check_reports(plain_console(), steps, tmp_path)
    assert "1 of 3 steps" in capsys.readouterr().out


def test_bad_input_is_one_message_and_status_2(tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text(GOOD + "{}\n")
    command = ["train", "--data", str(data), "--out", str(tmp_path / "out")]
    assert main(command) == 2
    error = "".join(capsys.readouterr().err.split())
    assert "RequestError" in error and "".join(f"{data}:2".split()) in error
    assert main([*command, "--model", str(tmp_path)]) == 2
    capsys.readouterr()
    for key, value in (
        ("alpha", "nan"),
        ("alpha", "0"),
        ("alpha", "1e31"),
        ("learning-rate", "-1"),
    ):
        assert main([*command, f"--{key}", value]) == 2
        assert key.replace("-", "_") in capsys.readouterr().err
    for out in (data / "out", tmp_path / "link"):  # in a file; a link to nothing
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(tmp_path / "nothing")
        assert main([*command[:-1], str(out)]) == 2
        assert "--out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    for wrong in (["--steps", "0"], ["--steps", "1", "--epochs", "1"], ["--seed", "x"]):
        with pytest.raises(SystemExit) as end:
            main([*command, *wrong])
        assert end.value.code == 2
