"""The loop of reinforcement learning: rewards rise, logprobs agree, adapters stay apart."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from lora_moe_jax import AdapterError, RequestError
from lora_moe_jax.cli import main
from lora_moe_jax.training import GrpoConfig, GrpoTask, LoraConfig, rl_demo, run_grpo
from lora_moe_jax.training.rl_demo import run_rl
from lora_moe_jax.training.rl_loop import GrpoReport, TaskReport
from tests.training.helpers import arrays, same, state

PROMPTS = [[5, 9, 40], [7], [100, 3, 3, 21, 80]]
SHORT = GrpoConfig(steps=3, prompts_per_step=2, group_size=4, max_tokens=8, learning_rate=0.02)


def even(prompt: list[int], completion: list[int]) -> float:
    return sum(token % 2 == 0 for token in completion) / len(completion)


def small(prompt: list[int], completion: list[int]) -> float:
    return sum(token < 64 for token in completion) / len(completion)


def add(trainer, name: str, seed: int = 0) -> None:
    trainer.add_adapter(name, LoraConfig(rank=4, alpha=8, seed=seed))


def test_rewards_rise_and_logprobs_agree(pair):
    engine, trainer = pair()
    targets = ["o_proj", "down_proj", "lm_head"]
    trainer.add_adapter("a", LoraConfig(rank=4, alpha=16, target_modules=targets))
    config = GrpoConfig(steps=15, prompts_per_step=2, max_tokens=8, learning_rate=0.05)
    reports = list(run_grpo(trainer, {"a": GrpoTask(PROMPTS, small)}, config))
    assert [report.step for report in reports] == list(range(1, 16))
    assert all(report.tasks["a"].kl == 0 for report in reports)
    assert all(report.tasks["a"].max_difference == 0 for report in reports)
    rewards = [report.tasks["a"].reward for report in reports]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.4


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["grpo", "importance_sampling"])
def test_two_adapters_in_one_loop_are_as_each_alone(pair, loss):
    engine, trainer = pair()
    config = GrpoConfig(**vars(SHORT) | {"loss": loss, "steps": 2})
    tasks = {"a": GrpoTask(PROMPTS, even), "b": GrpoTask(PROMPTS[:2], small)}
    seeds = {"a": 1, "b": 2}
    found = []
    for group in (["b", "a"], ["a"], ["b"]):
        for name in group:
            add(trainer, name, seeds[name])
        reports = list(run_grpo(trainer, {name: tasks[name] for name in group}, config))
        for name in group:
            rewards = [report.tasks[name].rewards for report in reports]
            texts = [c.token_ids for report in reports for c in report.tasks[name].completions]
            # The slot is another one alone; what is in it is not.
            found.append((name, rewards, texts, state(trainer, engine, name)))
            assert all(report.tasks[name].max_difference == 0 for report in reports)
        for name in group:
            trainer.remove_adapter(name)
            engine.unload_adapter(name)
    alone = {name: values for name, *values in found[2:]}
    for name, rewards, texts, arrays_together in found[:2]:
        assert same(rewards, alone[name][0]) and texts == alone[name][1]
        assert same(arrays_together, alone[name][2])


def test_a_batch_learns_completions_only(pair, monkeypatch):
    engine, trainer = pair()
    add(trainer, "a")
    seen = []
    step = trainer.forward_backward
    monkeypatch.setattr(
        trainer, "forward_backward", lambda batch, *rest: seen.extend(batch) or step(batch, *rest)
    )
    report = next(run_grpo(trainer, {"a": GrpoTask(PROMPTS, even)}, SHORT))
    completions = report.tasks["a"].completions
    assert len(seen) == len(completions) == 8
    prompts = [completion.prompt_token_ids for completion in completions]
    assert prompts[0] == prompts[3] != prompts[4] == prompts[7]
    for datum, completion in zip(seen, completions, strict=True):
        before = len(completion.prompt_token_ids) - 1
        after = len(completion.token_ids)
        assert datum.tokens == completion.prompt_token_ids + completion.token_ids
        assert datum.weights == [0.0] * before + [1.0] * after
        assert datum.inputs["old_logprobs"] == [0.0] * before + completion.logprobs
    assert len({tuple(completion.token_ids) for completion in completions}) > 1


def test_rewards_must_be_numbers(pair):
    engine, trainer = pair()
    add(trainer, "a")
    before = arrays(trainer._adapters["a"].masters)
    for value in (float("nan"), None, "much", 1e39, 10**400, np.complex64(1), [1.0]):
        run = run_grpo(trainer, {"a": GrpoTask(PROMPTS, lambda *_, value=value: value)}, SHORT)
        with pytest.raises(RequestError, match="reward") as caught:
            next(run)
        assert caught.value.key == "a"
    assert same(arrays(trainer._adapters["a"].masters), before)


def test_rewards_are_numbers_of_anybody(pair):
    engine, trainer = pair()
    add(trainer, "a")
    values = iter(
        [True, np.bool_(0), np.float32(1), jnp.bfloat16(0.5), jnp.ones(()), 3, 1e38, 0] * 3
    )
    report = next(run_grpo(trainer, {"a": GrpoTask(PROMPTS, lambda *_: next(values))}, SHORT))
    assert report.tasks["a"].rewards.tolist() == [[1, 0, 1, 0.5], [1, 3, 1e38, 0]]


def test_large_rewards_are_learned_from(pair):
    engine, trainer = pair()
    add(trainer, "a")
    task = GrpoTask(PROMPTS, lambda prompt, completion: 1.7e9 + completion[0] % 5)
    assert next(run_grpo(trainer, {"a": task}, SHORT)).tasks["a"].optimizer.gradient_norm > 0


def test_a_run_goes_on_where_one_has_ended(pair):
    engine, trainer = pair()
    found = []
    for parts in ([(0, 3)], [(0, 1), (1, 2)]):
        add(trainer, "a")
        seen = []
        for start, steps in parts:
            config = dataclasses.replace(SHORT, steps=steps)
            for report in run_grpo(trainer, {"a": GrpoTask(PROMPTS, even)}, config, start=start):
                prompts = [c.prompt_token_ids for c in report.tasks["a"].completions]
                seen.append((report.step, prompts))
        found.append((seen, state(trainer, engine, "a")))
        trainer.remove_adapter("a")
        engine.unload_adapter("a")
    (whole, arrays_of_whole), (parts, arrays_of_parts) = found
    assert whole == parts and [step for step, _ in whole] == [1, 2, 3]
    assert same(arrays_of_whole, arrays_of_parts)


def test_a_run_begins_without_a_gradient(pair):
    """A step that failed has left one."""

    def broken(steps):
        raise ValueError("a schedule that is none")

    engine, trainer = pair()
    norms = []
    for first in (None, broken):
        add(trainer, "a")
        tasks = {"a": GrpoTask(PROMPTS, even)}
        if first:
            with pytest.raises(ValueError, match="a schedule"):
                next(run_grpo(trainer, tasks, dataclasses.replace(SHORT, learning_rate=first)))
        report = next(run_grpo(trainer, tasks, SHORT))
        norms.append(report.tasks["a"].optimizer.gradient_norm)
        trainer.remove_adapter("a")
        engine.unload_adapter("a")
    assert norms[0] == norms[1] > 0
    with pytest.raises(AdapterError, match="in training"):
        trainer.zero_gradients(["a"])


def test_completions_that_may_be_too_long_for_the_trainer(pair, monkeypatch):
    engine, trainer = pair()
    add(trainer, "a")
    monkeypatch.setattr(type(trainer), "longest", 12)
    with pytest.raises(RequestError, match="no sequence as long") as caught:
        run_grpo(trainer, {"a": GrpoTask(PROMPTS, even)}, SHORT)
    assert caught.value.key == "tasks['a'].prompts[2]"


def test_bad_runs_are_refused_at_once(pair, monkeypatch):
    engine, trainer = pair()
    add(trainer, "a")
    good = {"a": GrpoTask(PROMPTS, even)}
    for key, value in (
        ("steps", 0),
        ("group_size", 1),
        ("max_tokens", 1.5),
        ("seed", -1),
        ("learning_rate", "1"),
        ("weight_decay", -1),
        ("loss", "no such"),
        ("loss", "cross_entropy"),
        ("loss", "dpo"),
        ("loss", print),
        ("loss_options", None),
    ):
        with pytest.raises(RequestError) as caught:
            run_grpo(trainer, good, GrpoConfig(**{key: value}))
        assert caught.value.key == key
    no_tasks = [GrpoTask(prompts, even) for prompts in ([], "text", None, iter(PROMPTS))]
    for task in (even, *no_tasks, GrpoTask(PROMPTS, 3)):
        with pytest.raises(RequestError, match="no task"):
            run_grpo(trainer, {"a": task})
    for tasks in ({}, None):
        with pytest.raises(RequestError):
            run_grpo(trainer, tasks)
    for start in (-1, 1.0, None):
        with pytest.raises(RequestError) as caught:
            run_grpo(trainer, good, start=start)
        assert caught.value.key == "start"
    with pytest.raises(RequestError, match="no such option"):
        run_grpo(trainer, good, GrpoConfig(loss_options={"wat": 1.0}))
    for prompts, config in (([[5], [99999]], SHORT), ([[5], [7]], GrpoConfig(max_tokens=5000))):
        with pytest.raises(RequestError) as caught:
            run_grpo(trainer, {"a": GrpoTask(prompts, even)}, config)
        assert caught.value.key.startswith("tasks['a'].prompts[")
    with pytest.raises(RequestError, match="settings"):
        run_grpo(trainer, good, {"steps": 1})
    few = dataclasses.replace(engine.options, max_waiting=0)
    with monkeypatch.context() as patched, pytest.raises(RequestError, match="too many requests"):
        patched.setattr(engine, "options", few)
        run_grpo(trainer, good, GrpoConfig(prompts_per_step=few.max_requests, group_size=2))
    with pytest.raises(AdapterError, match="in training"):
        run_grpo(trainer, {"b": GrpoTask(PROMPTS, even)})
    more = engine.options.max_adapters + 1
    for number in range(more):
        add(trainer, str(number))
    with pytest.raises(AdapterError, match="more adapters than slots"):
        run_grpo(trainer, {str(number): good["a"] for number in range(more)})


def test_command(capsys):
    with pytest.raises(SystemExit) as end:
        main(["rl", "--help"])
    assert end.value.code == 0 and "--steps" in capsys.readouterr().out
    for wrong in (["--steps", "0"], ["--seed", "-1"]):
        with pytest.raises(SystemExit) as end:
            main(["rl", *wrong])
        assert end.value.code == 2


def test_folders_that_are_there_are_refused_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rl_demo, "Engine", None)  # it is not asked for one
    (tmp_path / "digits").mkdir()
    (tmp_path / "file").touch()
    for out in (tmp_path, tmp_path / "file"):
        assert main(["rl", "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert "AdapterError" in error and str(out) in error and "choose another --out" in error


def fake_report(step: int) -> GrpoReport:
    rewards, optimizer = np.full((1, 2), step, np.float32), SimpleNamespace(gradient_norm=12.3456)
    completions = [SimpleNamespace(text="import os" * 20)]
    task = TaskReport(rewards, completions, 0.0, 0.0, -0.1, optimizer)
    return GrpoReport(step, dict.fromkeys(rl_demo.GOALS, task))


@pytest.fixture
def saved(monkeypatch) -> list[Path]:
    """Folders that the command writes, with neither engine nor trainer behind it."""
    folders = []
    trainer = SimpleNamespace(
        add_adapter=lambda *_: None, save_adapter=lambda name, folder: folders.append(folder)
    )
    monkeypatch.setattr(rl_demo.Engine, "from_pretrained", lambda *_, **__: None)
    monkeypatch.setattr(rl_demo, "Trainer", lambda *_, **__: trainer)
    monkeypatch.setattr(rl_demo, "_share", lambda *_: even)
    return folders


def interrupted_in(step: int, ctrl_c: Callable[[], None]) -> Callable[..., Iterator[GrpoReport]]:
    def run(*_: object) -> Iterator[GrpoReport]:
        for number in range(1, 31):
            if number == step:
                ctrl_c()
            yield fake_report(number)

    return run


def test_an_interrupt_sums_up_and_saves_whole_steps(saved, ctrl_c, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(rl_demo, "run_grpo", interrupted_in(4, ctrl_c))
    assert main(["rl", "--out", str(tmp_path / "out")]) == 130
    shown = capsys.readouterr()
    assert "4 steps in" in shown.out and "▁▃▆█" in shown.out and "step 5" not in shown.out
    assert shown.err == "interrupted after 4 of 30 steps\n"
    assert saved == [tmp_path / "out" / name for name in rl_demo.GOALS]


def test_an_interrupt_in_the_first_step_has_nothing_to_sum_up(
    saved, ctrl_c, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(rl_demo, "run_grpo", interrupted_in(1, ctrl_c))
    assert main(["rl", "--out", str(tmp_path / "out")]) == 130
    shown = capsys.readouterr()
    assert shown.err == "interrupted\n" and "first" not in shown.out and not saved


@pytest.mark.parametrize("width", [60, 80, 180])
def test_tables_show_the_newest_rewards(width):
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=True, color_system=None)
    reports = [fake_report(step) for step in range(1, 51)]
    with rl_demo._Display(console, 50) as display:
        for report in reports:
            display.show(report)
    rl_demo._summary(console, reports, 1.0)
    lines = text.getvalue().splitlines()
    curves = [line for line in lines if "▁▂" in line or "▁▁" in line]
    assert len(curves) >= 4 and all("█ │" in line for line in curves[-4:])


@pytest.mark.slow
def test_demo(tmp_path):
    text = io.StringIO()
    reports = run_rl(Console(file=text, width=160), steps=30, out=tmp_path / "out")
    for name in ("upper", "digits"):
        tasks = [report.tasks[name] for report in reports]
        assert all(task.kl == task.max_difference == 0 for task in tasks)
        rewards = [task.reward for task in tasks]
        assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.3
        assert main(["inspect", str(tmp_path / "out" / name)]) == 0
    shown = text.getvalue()
    assert shown.count("step ") >= 60 and "first" in shown and "0, 0" in shown
