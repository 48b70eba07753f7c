"""Bad input is refused with an error of the library, and the engine goes on as if nothing was."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib

import numpy as np
import pytest

from lora_moe_jax import AdapterError, LoraMoeError, RequestError, SamplingParams, read_adapter
from tests.adapters.corpus import CORPUS
from tests.adapters.files import load, save
from tests.adapters.tables import GOLDEN
from tests.serving.conftest import hand_back, shared
from tests.serving.helpers import ADAPTERS, greedy, load_golden, probe, prompts, sampled

FAMILY = "deepseek_v3"
FOLDERS = GOLDEN / FAMILY / "adapters"


def state(engine) -> tuple:
    """All of the bank's bits, what is loaded, what is free, and what requests are answered."""
    digest = hashlib.sha256()
    for lora in engine.bank.arrays.values():
        for array in lora:
            digest.update(np.asarray(array).tobytes())
    stats = engine.stats()
    return (
        digest.hexdigest(),
        engine.adapters(),
        (stats.compilations, stats.running, stats.waiting, stats.free_pages),
        [probe(engine, name) for name in (None, *ADAPTERS)],
        engine.generate(prompts([5, 9]), [greedy(6), sampled(1, 6)], ["attn", None]),
    )


@pytest.fixture(scope="module")
def loaded(engines):
    """An engine with adapters, and its state."""
    one = shared(engines, FAMILY)
    load_golden(one, FAMILY)
    yield one, state(one)
    hand_back(one)


@pytest.fixture
def one(loaded):
    """A loaded engine, which must be the same afterwards."""
    one, before = loaded
    yield one
    assert state(one) == before


# ---- adapters ------------------------------------------------------------------------------------
def test_the_corpus_of_bad_adapters(one, tmp_path):
    before = state(one)
    for name, break_it in CORPUS.items():
        folder = tmp_path / name
        break_it(folder)
        for target in ("fresh", "attn"):
            with pytest.raises(AdapterError):
                one.load_adapter(target, folder)
        assert one.adapters() == before[1], name
    assert len(CORPUS) >= 100


BAD_NAMES = ["", ".", "..", "a/b", "/", "../x", "a\\b", "a b", "a\n", "\0", "ü", "x" * 129, None,
             3, b"a", ["a"], ("a",), float("nan"), pathlib.Path("a")]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_bad_names(one, name):
    with pytest.raises(AdapterError, match="cannot name an adapter"):
        one.load_adapter(name, FOLDERS / "attn")
    with pytest.raises(AdapterError, match="cannot name an adapter"):
        one.unload_adapter(name)
    if name is not None:
        with pytest.raises(RequestError) as caught:
            one.generate([[1, 2]], greedy(2), [name])
        assert caught.value.key == "adapters[0]"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_bad_value_in_one_expert(one, tmp_path, value):
    tensors, config = load(FOLDERS / "per_expert")
    name = next(n for n in tensors if "experts.6.down_proj.lora_B" in n)
    tensors[name][1, 0] = value
    with pytest.raises(AdapterError, match="not finite") as caught:
        one.load_adapter("bad", save(tmp_path / "bad", tensors, **config))
    assert caught.value.key == name


def test_a_rank_above_the_banks(one, tmp_path):
    tensors, config = load(FOLDERS / "rslora")
    name = "base_model.model.model.layers.1.self_attn.o_proj"
    for side, shape in (("A", (64, 48)), ("B", (64, 64))):
        tensors[f"{name}.lora_{side}.weight"] = np.ones(shape, np.float32)
    config["rank_pattern"] |= {r"layers\.1\.self_attn\.o_proj": 64}
    with pytest.raises(AdapterError, match="rank is too large") as caught:
        one.load_adapter("big", save(tmp_path / "big", tensors, **config))
    assert "16" in str(caught.value) and "64" in str(caught.value)
    big = read_adapter(tmp_path / "big", one.bank.projections)
    with pytest.raises(AdapterError, match="rank is above the bank's"):
        one.load_adapter("big", big)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_adapter_of_another_base(one, family):
    for folder in sorted((GOLDEN / family / "adapters").iterdir()):
        with pytest.raises(AdapterError):
            one.load_adapter("stranger", folder)


@pytest.mark.parametrize("source", [None, 7, b"x", "", "no/such/folder", "a\0b", FOLDERS])
def test_bad_sources(one, source):
    with pytest.raises(AdapterError):
        one.load_adapter("new", source)


def changed(pair, **changes):
    return dataclasses.replace(pair, **changes)


def with_nan(array):
    array = array.copy()
    array[-1, -1, -1] = np.nan
    return array


BAD_PAIRS = {
    "nan in a": lambda p: changed(p, a=with_nan(p.a)),
    "nan in b": lambda p: changed(p, b=with_nan(p.b)),
    "infinite scaling": lambda p: changed(p, scaling=p.scaling + np.float32(np.inf)),
    "narrow a": lambda p: changed(p, a=p.a[..., :1]),
    "wide b": lambda p: changed(p, b=np.concatenate([p.b, p.b], axis=-1)),
    "ranks differ": lambda p: changed(p, b=p.b[:, :1]),
    "no rank": lambda p: changed(p, a=p.a[:, :0], b=p.b[:, :0]),
    "two groups": lambda p: changed(p, a=np.concatenate([p.a, p.a])),
    "two dimensions": lambda p: changed(p, a=p.a[0]),
    "float64": lambda p: changed(p, a=p.a.astype(np.float64)),
    "scaling of groups": lambda p: changed(p, scaling=np.ones(3, np.float32)),
}


@pytest.mark.parametrize("kind", BAD_PAIRS)
def test_bad_adapters_in_memory(one, kind):
    """The last projection is the bad one: what was right before it is not written either."""
    adapter = read_adapter(FOLDERS / "attn", one.bank.projections)
    name = list(adapter.pairs)[-1]
    pairs = dict(adapter.pairs) | {name: BAD_PAIRS[kind](adapter.pairs[name])}
    for target in ("new", "rslora"):
        with pytest.raises(AdapterError) as caught:
            one.load_adapter(target, dataclasses.replace(adapter, pairs=pairs))
        assert caught.value.key == name


def test_an_adapter_in_memory_for_a_projection_that_is_not_there(one):
    adapter = read_adapter(FOLDERS / "attn", one.bank.projections)
    pairs = dict(adapter.pairs)
    pairs["model.layers.0.self_attn.z_proj"] = next(iter(pairs.values()))
    with pytest.raises(AdapterError) as caught:
        one.load_adapter("new", dataclasses.replace(adapter, pairs=pairs))
    assert caught.value.key == "model.layers.0.self_attn.z_proj"


# ---- requests ------------------------------------------------------------------------------------
BAD_PROMPTS = {
    "a string": "hello",
    "bytes": b"hello",
    "a flat list": [1, 2, 3],
    "a flat array": np.arange(3),
    "a number": 5,
    "None": None,
    "a generator": (p for p in [[1]]),
    "a set": {(1, 2)},
    "a dictionary": {"prompt": [1]},
    "mixed": [[1, 2], 3],
    "None inside": [[1, 2], None],
    "no tokens": [[1, 2], []],
    "an array without tokens": [np.zeros(0, np.int32)],
    "an array of no dimensions": [np.array(5)],
    "an array of two dimensions": [np.ones((2, 2), np.int32)],
    "token too large": [[1, 2], [3, 256]],
    "token far too large": [[10**30]],
    "token negative": [[5, -1]],
    "token True": [[True, 2]],
    "token of NumPy's bool": [np.array([True])],
    "token 1.0": [[1.0, 2.0]],
    "float array": [np.array([1.0])],
    "token a string": [["1"]],
    "token None": [[1, None]],
    "text": [[1, 2], "hello"],
    "bytes inside": [b"hello"],
    "too long": [[1] * 129],
}


@pytest.mark.parametrize("prompt", BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_bad_prompts(one, prompt):
    for call in (
        lambda: one.generate(prompt, greedy(1)),
        lambda: one.stream(prompt, greedy(1)),
        lambda: one.score(prompt),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert caught.value.key.startswith(("prompts", "token_ids"))


def test_prompt_and_output_longer_than_the_cache(one):
    with pytest.raises(RequestError, match="the request is too long") as caught:
        one.generate([[1, 2], [1] * 100], greedy(29))
    assert caught.value.key == "prompts[1]" and "128" in caught.value.expected
    with pytest.raises(RequestError, match="the request is too long"):
        one.generate([[1]], SamplingParams(max_tokens=2**31 - 1))


@pytest.mark.parametrize(
    "adapters",
    [["nobody"], ["attn", "attn"], [], "nobody", 5, {"attn": 0}, [None, None], ["ATTN"], [3]],
    ids=repr,
)
def test_bad_adapters_of_requests(one, adapters):
    for call in (
        lambda: one.generate([[1, 2]], greedy(1), adapters),
        lambda: one.stream([[1, 2]], greedy(1), adapters),
        lambda: one.score([[1, 2]], adapters),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert caught.value.key.startswith("adapters")


@pytest.mark.parametrize(
    "params", [[], [greedy()] * 2, [None], "greedy", 5, {"max_tokens": 3}, [{"max_tokens": 3}]]
)
def test_bad_params_of_requests(one, params):
    with pytest.raises(RequestError) as caught:
        one.generate([[1, 2]], params)
    assert caught.value.key.startswith("params")
    if isinstance(params, dict):
        assert "SamplingParams" in caught.value.expected


def test_a_stop_token_is_one_of_the_models(one):
    last = one.config.vocab_size - 1
    one.generate([[1, 2]], SamplingParams(max_tokens=1, stop_token_ids=[np.int64(last)]))
    with pytest.raises(RequestError) as caught:
        one.generate([[1, 2]], SamplingParams(stop_token_ids=[3, last + 1]))
    assert caught.value.key == "params[0].stop_token_ids"


def test_a_lone_sequence_to_score(one):
    with pytest.raises(RequestError) as caught:
        one.score([1, 2, 3])
    assert caught.value.key == "token_ids"


def test_text_needs_a_tokenizer(one):
    with pytest.raises(RequestError, match="tokenizer") as caught:
        one.generate([[1, 2]], greedy(2, stop=["x"]))
    assert caught.value.key == "params[0].stop"
    for call in (lambda: one.generate(["hello"]), lambda: one.score(["hello"])):
        with pytest.raises(RequestError, match="tokenizer"):
            call()
    with pytest.raises(RequestError, match="tokenizer"):
        one.chat([{"role": "user", "content": "hello"}])


def test_a_bad_request_among_good_ones_starts_none(one):
    with pytest.raises(RequestError):
        one.generate([[1, 2], [3, 4], [5, 999]], greedy(4), ["attn", None, None])
    assert one.stats().running == one.stats().waiting == 0


BAD_SETTINGS = [
    ("max_tokens", (0, -1, 1.5, "3", None, True, 2**31)),
    ("temperature", (-0.1, float("nan"), float("inf"), "1", None, True, 10**400, 1e39)),
    ("top_k", (-2, 1.5, None, True, 2**40)),
    ("top_p", (0, -0.5, 1.01, float("nan"), None, "1")),
    ("min_p", (-0.1, 1.1, float("nan"), None)),
    ("seed", (-(2**63) - 1, 2**63, 1.0, "1", True)),
    ("stop", ([""], [3], None, 5, b"x", {"a": 1}, ["a", None], ["a"] * 33, ["a" * 257])),
    ("stop_token_ids", ([-1], ["a"], [1.0], [True], None, 5, "12")),
    ("ignore_eos", (1, None, "yes")),
    ("logprobs", (21, -1, 1.0, "1")),
]


@pytest.mark.parametrize(("key", "values"), BAD_SETTINGS)
def test_bad_sampling_settings(key, values):
    for value in values:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{key: value})
        assert caught.value.key == key, value
        assert isinstance(caught.value, LoraMoeError)
