"""The config's rules: defaults, patterns, and what is targeted, of which PEFT is the oracle."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from lora_moe_jax.adapters import AdapterConfig, check_name
from lora_moe_jax.adapters.config import parse_config
from lora_moe_jax.adapters.targets import Targets
from lora_moe_jax.errors import AdapterError

NAMES = [
    "lm_head",
    "model.embed_tokens",
    *(
        f"model.layers.{i}.{leaf}"
        for i in (0, 1, 10, 11)
        for leaf in (
            "self_attn.q_proj", "self_attn.kv_a_proj_with_mqa", "mlp.gate", "mlp.gate_proj",
            "mlp.shared_experts.gate_proj", "mlp.experts.0.gate_proj", "mlp.experts.11.gate_proj",
            "mlp.experts.1.w1", "mlp.experts.gate_up_proj", "mlp.experts.down_proj",
        )
    ),
]  # fmt: skip

TARGETS = [
    dict(target_modules=["q_proj", "gate"]),
    dict(target_modules=["gate_proj"]),
    dict(target_modules=["experts.1.gate_proj", "experts.11.gate_proj"]),
    dict(target_modules=["model.layers.1.self_attn.q_proj"]),
    dict(target_modules=["proj", "_proj", "layers"]),
    dict(target_modules=r".*\.(q_proj|gate)"),
    dict(target_modules="q_proj"),
    dict(target_modules=r"model\.layers\.\d\..*gate_proj"),
    dict(target_modules=r"(?:.*?(?:self_attn|mlp).*?(?:q_proj|gate_proj).*?)|(?:\blm_head)"),
    dict(target_modules=["gate_proj", "q_proj"], exclude_modules=["shared_experts.gate_proj"]),
    dict(target_modules=["gate_proj", "q_proj"], exclude_modules=r".*layers\.1.*"),
    dict(target_modules=["gate_proj", "q_proj", "lm_head"], layers_to_transform=[1, 11]),
    dict(target_modules=["gate_proj", "q_proj"], layers_to_transform=0),
    dict(target_modules=["gate_proj", "q_proj"], layers_to_transform=[1], layers_pattern="layers"),
    dict(target_modules=["gate_proj"], layers_to_transform=[1, 11], layers_pattern=["experts"]),
    dict(target_modules=["gate_proj"], layers_to_transform=[1], layers_pattern=["blocks", "l.*s"]),
    dict(target_modules=[], target_parameters=["experts.gate_up_proj", "down_proj"]),
]

PATTERNS = [
    {"gate_proj": 1, r"experts\.\d+\.gate_proj": 2},
    {r"experts\.\d+\.gate_proj": 2, "gate_proj": 1},
    {r"layers\.1\.self_attn\.q_proj": 3, "q_proj": 4},
    {".*gate": 5, "mlp.gate": 6},
    {r".*\.experts\.gate_up_proj": 7, r"^model\.layers\.0.*": 8},
    {"q_proj|gate": 9},
    {"roj": 10, "_proj": 11, "layers": 12},
    {r"model.layers.1.mlp.gate": 13},
]


def targets(**settings) -> Targets:
    return Targets(parse_config(settings, "adapter_config.json"), "adapter_config.json")


@pytest.mark.parity
@pytest.mark.parametrize("settings", TARGETS, ids=str)
def test_targets_are_peft_s(settings):
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    theirs, ours = LoraConfig(**settings), targets(**settings)
    for name in NAMES:
        assert ours.module(name) == bool(check_target_module_exists(theirs, name)), name
        suffixes = settings.get("target_parameters", [])
        wanted = name in suffixes or any(name.endswith(f".{suffix}") for suffix in suffixes)
        assert ours.parameter(name) == wanted


@pytest.mark.parity
@pytest.mark.parametrize("patterns", PATTERNS, ids=str)
def test_patterns_are_peft_s(patterns):
    from peft.utils.other import get_pattern_key

    ours = targets(target_modules=["q"], r=99, rank_pattern=patterns, alpha_pattern=patterns)
    for name in NAMES:
        expected = patterns.get(get_pattern_key(list(patterns), name), 99)
        assert ours.rank(name) == expected, name
        alpha = patterns.get(get_pattern_key(list(patterns), name), 8)
        assert ours.scaling(name) == alpha / expected


def test_scaling_is_float64_after_patterns():
    pattern = {"q_proj": 3}
    plain = targets(target_modules=["q"], r=16, lora_alpha=5, rank_pattern=pattern)
    stable = targets(
        target_modules=["q"], r=16, lora_alpha=5, rank_pattern=pattern, use_rslora=True
    )
    assert plain.scaling("a.q_proj") == 5 / 3 and plain.scaling("a.k_proj") == 5 / 16
    assert stable.scaling("a.q_proj") == 5 / np.sqrt(3) and stable.scaling("k") == 5 / 4


def test_null_false_and_empty_mean_nothing():
    config = parse_config(
        {
            "target_modules": ["q_proj"], "r": None, "lora_alpha": None, "bias": None,
            "use_dora": False, "modules_to_save": [], "layer_replication": None,
            "eva_config": {"rho": 2.0}, "layers_pattern": "", "layers_to_transform": [],
            "rank_pattern": None, "an_option_of_the_future": False, "init_lora_weights": None,
            "auto_mapping": {"parent_library": "x"}, "lora_dropout": 0.1, "revision": "main",
        },
        "f",
    )  # fmt: skip
    assert config == AdapterConfig(target_modules=("q_proj",))
    for init in (True, False, "gaussian", "eva", "orthogonal", "mica"):
        parse_config({"target_modules": ["q"], "init_lora_weights": init}, "f")


def test_all_linear_names_no_module_by_itself():
    every = targets(target_modules="All-Linear", exclude_modules=["lm_head"])
    assert every.all_linear and every.excludes("lm_head")
    assert not any(map(every.module, NAMES))


@pytest.mark.parametrize("pattern", ["(?:[a-z0-9._]|.)" * 40 + "[XYZ]", "(?:.*?[a-z]){12}[XYZ]"])
def test_slow_expressions_are_stopped(monkeypatch, pattern):
    """All their matches together; and other threads go on meanwhile."""
    monkeypatch.setattr("lora_moe_jax.adapters.patterns.MAX_SECONDS", 0.4)
    seen, done = [], threading.Event()

    def look_at_the_clock():
        while not done.is_set():
            seen.append(time.monotonic())
            time.sleep(0.01)

    thread = threading.Thread(target=look_at_the_clock)
    thread.start()
    slow = targets(target_modules=pattern)
    try:
        with pytest.raises(AdapterError, match="too long"):
            for number in range(10**6):
                slow.module(f"model.layers.{number}.mlp.experts.127.gate_proj.lora_A" + "b" * 20)
    finally:
        done.set()
        thread.join()
    assert len(seen) > 10 and max(np.diff(seen)) < 0.3


def test_usual_expressions():
    usual = (
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)"
        r".*?(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:k_proj|q_proj)))"
    )
    assert targets(target_modules=usual).module("model.layers.3.self_attn.q_proj")
    assert targets(target_modules=r"model\.[a-z()*+]+\.q\*\)+").module("model.(a.q*)")


@pytest.mark.parametrize("name", ["poet", "a", "x" * 128, "A-1_b.c", "..."])
def test_good_names(name):
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../x", "a b", "x" * 129, "é", "a\n", "a\0", None, 7, b"a"]
)
def test_bad_names(name):
    with pytest.raises(AdapterError, match="name"):
        check_name(name)
