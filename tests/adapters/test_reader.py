"""Every layout is read into the same pairs; packed ones are checked against their definition."""

from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
import pytest

from lora_moe_jax.adapters import Projection, describe, read_adapter
from lora_moe_jax.errors import AdapterError
from tests.adapters.files import assert_same, load, save
from tests.adapters.tables import FAMILIES, GOLDEN, golden_adapters, table

P = "base_model.model."
MOE = FAMILIES[1:]
MORE_LAYOUTS = ("qwen3_moe", "deepseek_v2", "deepseek_v3")
GOLDENS = [(family, name) for family in FAMILIES for name in golden_adapters(family)]
LAYOUTS = {"experts": "packed", "experts_swapped": "packed", "per_expert": "per_expert",
           "shared_outer": "shared_outer"}  # fmt: skip


def golden(family: str, name: str):
    return GOLDEN / family / "adapters" / name


def delta(adapter, name: str, group: int = 0) -> np.ndarray:
    """The change of one weight, [out, in], in float64."""
    pair = adapter.pairs[name]
    a, b, scaling = (x[group if len(x) > 1 else 0] for x in (pair.a, pair.b, pair.scaling))
    return float(scaling) * b.T.astype(np.float64) @ a.astype(np.float64)


@pytest.mark.parametrize(("family", "name"), GOLDENS, ids=["-".join(g) for g in GOLDENS])
def test_golden_shapes_and_layout(family, name):
    projections = table(family)
    adapter = read_adapter(golden(family, name), projections, max_rank=8)
    moe = family != "qwen3"
    assert adapter.layout == (LAYOUTS.get(name, "module") if moe else "module")
    assert adapter.pairs
    for key, pair in adapter.pairs.items():
        p = projections[key]
        assert pair.a.shape[1:] == (pair.rank, p.in_features)
        assert pair.b.shape[1:] == (pair.rank, p.out_features)
        assert max(len(pair.a), len(pair.b)) == p.groups == len(pair.ranks) == len(pair.scaling)
        assert pair.a.dtype == pair.b.dtype == pair.scaling.dtype == np.float32
        assert pair.ranks.dtype == np.int32 and (pair.ranks == pair.rank).all()
        if name == "shared_outer":
            shared, own = (pair.b, pair.a) if "down" in key else (pair.a, pair.b)
            assert (len(shared), len(own)) == (1, p.groups)
    config = load(golden(family, name))[1]
    assert (adapter.config.r, adapter.config.lora_alpha) == (config["r"], config["lora_alpha"])


@pytest.mark.parametrize("family", FAMILIES)
def test_rslora_and_patterns(family):
    adapter = read_adapter(golden(family, "rslora"), table(family))
    for name, pair in adapter.pairs.items():
        patterned = "layers.0.self_attn.q" in name
        rank, alpha = (3, 5) if patterned else (8, 16)
        assert pair.ranks.tolist() == [rank]
        assert pair.scaling == np.float32(alpha / np.sqrt(rank))


@pytest.mark.parametrize("family", MOE)
def test_packed_experts_are_what_peft_defines(family):
    """FORMATS: row e*r+k of A, column k*E+e of B, one element at a time."""
    tensors, config = load(golden(family, "experts"))
    projections, rank = table(family), config["r"]
    scaling = config["lora_alpha"] / rank
    adapters = [
        read_adapter(golden(family, n), projections) for n in ("experts", "experts_swapped")
    ]
    assert_same(*adapters)
    blocks = sorted({n.rpartition(".")[0] for n, p in projections.items() if p.kind == "expert"})
    assert len(blocks) == (3 if family == "gpt_oss" else 2)
    for block in blocks:
        for module, leaves in (("", ["down_proj"]), (".base_layer", ["gate_proj", "up_proj"])):
            a, b = (tensors[f"{P}{block}{module}.lora_{side}.weight"] for side in "AB")
            groups = projections[f"{block}.down_proj"].groups
            for e in range(groups):
                expected = np.zeros((b.shape[0], a.shape[1]))
                for k in range(rank):
                    column = b[:, k * groups + e].astype(np.float64)
                    expected += scaling * np.outer(column, a[e * rank + k])
                if family == "gpt_oss" and len(leaves) == 2:
                    expected = np.concatenate([expected[0::2], expected[1::2]])
                for adapter in adapters:
                    found = np.concatenate([delta(adapter, f"{block}.{n}", e) for n in leaves])
                    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("family", MORE_LAYOUTS)
def test_per_expert_and_stacked_deltas(family):
    for name in ("per_expert", "shared_outer"):
        tensors, config = load(golden(family, name))
        adapter = read_adapter(golden(family, name), table(family))
        letters = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
        for key in [k for k in tensors if "lora_A" in k]:
            a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
            expected = config["lora_alpha"] / config["r"] * (b.astype(float) @ a.astype(float))
            module = key.removeprefix(P).removesuffix(".lora_A.weight")
            parts = module.split(".")
            parts[-1] = letters.get(parts[-1], parts[-1])
            expert = int(parts.pop(-2)) if parts[-2].isdecimal() else None
            for e in range(8) if expected.ndim == 3 else [expert or 0]:
                want = expected[e] if expected.ndim == 3 else expected
                np.testing.assert_allclose(delta(adapter, ".".join(parts), e), want, rtol=1e-12)


# ---- other spellings of the same adapter ---------------------------------------------------------
def test_names_without_prefix_and_with_an_adapter_name(tmp_path):
    source = golden("deepseek_v3", "per_expert")
    tensors, config = load(source)
    original = read_adapter(source, table("deepseek_v3"))
    plain = {name.removeprefix(P): t for name, t in tensors.items()}
    named = {name.replace(".weight", ".default.weight"): t for name, t in tensors.items()}
    for number, spelt in enumerate((plain, named)):
        folder = save(tmp_path / str(number), spelt, **config)
        assert_same(original, read_adapter(folder, table("deepseek_v3")))


def test_tinker_names_for_attention_of_gpt_oss(tmp_path):
    source = golden("gpt_oss", "attn")
    tensors, config = load(source)
    renamed = {name.replace(".self_attn.", ".attn."): t for name, t in tensors.items()}
    for targets in (config["target_modules"], "all-linear"):
        folder = save(tmp_path / str(len(targets)), renamed, **config | {"target_modules": targets})
        found = read_adapter(folder, table("gpt_oss"))
        assert_same(read_adapter(source, table("gpt_oss")), found)


@pytest.mark.parametrize("block", ["mlp", "block_sparse_moe"])
def test_mixtral_names_for_experts(block, tmp_path):
    source = golden("qwen3_moe", "per_expert")
    tensors, config = load(source)
    renamed = {}
    for name, tensor in tensors.items():
        if ".mlp.experts." in name:
            for leaf, w in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
                name = name.replace(leaf, w)
            name = name.replace(".mlp.", f".{block}.")
        renamed[name] = tensor
    for targets in (config["target_modules"], [*config["target_modules"], "w1", "w2", "w3"]):
        config["target_modules"] = targets
        folder = save(tmp_path / str(len(targets)), renamed, **config)
        original = read_adapter(source, table("qwen3_moe"))
        assert_same(original, read_adapter(folder, table("qwen3_moe")))


def test_megatron_mix_of_shared_3d_and_per_expert_2d(tmp_path):
    source = golden("deepseek_v2", "shared_outer")
    tensors, config = load(source)
    mixed = {}
    letters = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for name, tensor in tensors.items():
        w = name.split(".")[-3]
        name = name.replace(f".{w}.", f".{letters[w]}.")
        if len(tensor) == 1:
            mixed[name] = tensor
            continue
        for e, one in enumerate(tensor):
            mixed[name.replace(".experts.", f".experts.{e}.")] = one
    config["target_modules"] = [f"experts.{e}.{n}" for e in range(8) for n in letters.values()]
    found = read_adapter(save(tmp_path, mixed, **config), table("deepseek_v2"))
    assert found.layout == "mixed"
    assert_same(read_adapter(source, table("deepseek_v2")), found)


def test_a_shared_factor_has_the_rank_of_every_expert(tmp_path):
    block = f"{P}model.layers.1.mlp.experts"
    tensors = {f"{block}.gate_proj.lora_A.weight": np.ones((1, 3, 64), np.float32)}
    for e in range(8):
        tensors[f"{block}.{e}.gate_proj.lora_B.weight"] = np.ones((24, 2), np.float32)
    chosen = r".*layers\.1\.mlp\.experts\.(\d+\.)?gate_proj"
    pattern = {r"experts\.\d\.gate_proj": 2}
    save(tmp_path, tensors, r=3, target_modules=chosen, rank_pattern=pattern)
    with pytest.raises(AdapterError, match="different ranks"):
        read_adapter(tmp_path, table("deepseek_v3"))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("form", ["stacked", "per_expert"])
def test_fused_gate_up_outside_peft_packing(form, family, tmp_path):
    source = golden(family, "experts")
    original = read_adapter(source, table(family))
    blocks = {n.rpartition(".")[0] for n in original.pairs if n.endswith("experts.up_proj")}
    tensors = {}
    for block in blocks:
        gate, up, down = (original.pairs[f"{block}.{n}_proj"] for n in ("gate", "up", "down"))
        fused = np.concatenate([gate.b, up.b], axis=2).swapaxes(1, 2)
        if family == "gpt_oss":
            fused[:, 0::2], fused[:, 1::2] = gate.b.swapaxes(1, 2), up.b.swapaxes(1, 2)
        for name, a, b in (
            ("gate_up_proj", gate.a, fused),
            ("down_proj", down.a, down.b.swapaxes(1, 2)),
        ):
            if form == "stacked":
                tensors[f"{P}{block}.{name}.lora_A.weight"] = a
                tensors[f"{P}{block}.{name}.lora_B.weight"] = b
                continue
            for e in range(8):
                tensors[f"{P}{block}.{e}.{name}.lora_A.weight"] = a[e]
                tensors[f"{P}{block}.{e}.{name}.lora_B.weight"] = b[e]
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    save(tmp_path, tensors, r=2, lora_alpha=6, target_modules=[], target_parameters=parameters)
    found = read_adapter(tmp_path, table(family))
    assert found.layout == form
    experts = {n: p for n, p in original.pairs.items() if ".experts." in n}
    assert_same(type(original)(experts, "", original.config), found)


def test_expert_major_columns_when_the_config_says_so(tmp_path):
    source = golden("deepseek_v3", "experts")
    tensors, config = load(source)
    for name, b in tensors.items():
        if ".experts." in name and "lora_B" in name:
            tensors[name] = b.reshape(len(b), 2, 8).swapaxes(1, 2).reshape(b.shape)
    folder = save(tmp_path, tensors, **config, lora_B_layout="expert_major")
    found = read_adapter(folder, table("deepseek_v3"))
    assert_same(read_adapter(source, table("deepseek_v3")), found)


@pytest.mark.parametrize("leaf", ["gate_proj", "up_proj"])
def test_a_factor_of_two_projections_needs_slots_of_both(leaf):
    without = {n: p for n, p in table("qwen3_moe").items() if not n.endswith(f"experts.{leaf}")}
    with pytest.raises(AdapterError, match="some of them have no slots") as error:
        read_adapter(golden("qwen3_moe", "experts"), without, max_rank=8)
    assert f"experts.{leaf}" in str(error.value) and "target_modules" in str(error.value)


@pytest.mark.parametrize("leaf", ["gate_up_proj", "down_proj"])
def test_single_packed_parameter_is_the_one_the_config_names(leaf, tmp_path):
    source = golden("deepseek_v3", "experts")
    tensors, config = load(source)
    inner = ".base_layer" if leaf == "gate_up_proj" else ""
    single = {
        f"{P}model.layers.{i}.mlp.experts.lora_{side}.weight": tensors[
            f"{P}model.layers.{i}.mlp.experts{inner}.lora_{side}.weight"
        ]
        for i in (1, 2)
        for side in "AB"
    }
    config |= {"target_modules": [], "target_parameters": [f"experts.{leaf}"]}
    found = read_adapter(save(tmp_path, single, **config), table("deepseek_v3"))
    original = read_adapter(source, table("deepseek_v3"))
    leaves = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else ["down_proj"]
    want = {n: p for n, p in original.pairs.items() if n.split(".")[-1] in leaves}
    assert found.pairs.keys() == want.keys()
    assert_same(type(original)(want, "", original.config), found)


def square_table() -> dict[str, Projection]:
    block = "model.layers.0.mlp.experts"
    sizes = {"gate_proj": (8, 4), "up_proj": (8, 4), "down_proj": (4, 8)}
    return {
        f"{block}.{leaf}": Projection(f"{block}.{leaf}", n_in, n_out, 2, "expert")
        for leaf, (n_in, n_out) in sizes.items()
    }


def save_square(folder, leaf: str, version: str | None) -> dict[bool, list[np.ndarray]]:
    """A packed parameter, 8 by 8, of two experts; the change of each, A and B exchanged or not."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2 * 3, 8)), rng.standard_normal((8, 3 * 2))
    name = f"{P}model.layers.0.mlp.experts.lora_"
    tensors = {f"{name}A.weight": a.astype("f4"), f"{name}B.weight": b.astype("f4")}
    settings = dict(r=3, lora_alpha=3, target_modules=[], peft_version=version)
    save(folder, tensors, **settings, target_parameters=[f"experts.{leaf}"])
    natural = [b[:, e::2] @ a[3 * e : 3 * e + 3] for e in range(2)]
    return {False: natural, True: [change.T for change in natural]}


@pytest.mark.parametrize(
    ("version", "swapped"),
    [("0.17.0", True), ("0.19.0", True), ("0.19.1", False), ("0.21.2", False), (None, None),
     ("0.19.1.dev0", None), ("new", None)],
)  # fmt: skip
def test_square_packed_parameter_is_oriented_by_version(version, swapped, tmp_path):
    """gate_up_proj is 8 by 8, so its shape says nothing."""
    changes = save_square(tmp_path, "gate_up_proj", version)
    if swapped is None:
        with pytest.raises(AdapterError, match="peft_version"):
            read_adapter(tmp_path, square_table())
        return
    found = read_adapter(tmp_path, square_table())
    for e, change in enumerate(changes[swapped]):
        halves = [delta(found, f"model.layers.0.mlp.experts.{n}_proj", e) for n in ("gate", "up")]
        np.testing.assert_allclose(np.concatenate(halves), change, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("version", "swapped"),
    [("0.17.0", False), ("0.18.1", False), ("0.19.0", True), ("0.19.1", False), (None, None)],
)
def test_square_down_proj_of_gpt_oss(version, swapped, tmp_path):
    """One version of PEFT alone has exchanged A and B where weights are [in, out]."""
    changes = save_square(tmp_path, "down_proj", version)
    block = "model.layers.0.mlp.experts"
    projections = {
        f"{block}.{leaf}": Projection(f"{block}.{leaf}", 8, 8, 2, "expert", interleaved=True)
        for leaf in ("gate_proj", "up_proj", "down_proj")
    }
    if swapped is None:
        with pytest.raises(AdapterError, match="peft_version"):
            read_adapter(tmp_path, projections)
        return
    found = read_adapter(tmp_path, projections)
    for e, change in enumerate(changes[swapped]):
        found_change = delta(found, f"{block}.down_proj", e)
        np.testing.assert_allclose(found_change, change, rtol=1e-5, atol=1e-6)


def test_square_packed_parameter_is_oriented_by_its_sibling(tmp_path):
    """down_proj shows that the file is swapped, whatever its version says."""
    rng = np.random.default_rng(0)
    name = f"{P}model.layers.0.mlp.experts"
    shapes = {".base_layer.lora_A": (4, 8), ".base_layer.lora_B": (8, 4),
              ".lora_A": (4, 8), ".lora_B": (4, 4)}  # fmt: skip
    tensors = {f"{name}{k}.weight": rng.standard_normal(s).astype("f4") for k, s in shapes.items()}
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    save(tmp_path, tensors, r=2, lora_alpha=2, target_modules=[], target_parameters=parameters,
         peft_version="0.21.2")  # fmt: skip
    found = read_adapter(tmp_path, square_table())
    b = tensors[f"{name}.base_layer.lora_B.weight"]  # swapped: [in, rank * experts]
    np.testing.assert_array_equal(found.pairs[f"{name.removeprefix(P)}.up_proj"].a[1], b[:, 1::2].T)


# ---- what else a base model has ------------------------------------------------------------------
def test_embedding_head_router_and_base_copies(tmp_path):
    rng = np.random.default_rng(1)
    projections = table("deepseek_v3")

    def random(*shape):
        return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)

    tensors = {
        f"{P}model.embed_tokens.lora_embedding_A": random(4, 256),
        f"{P}model.embed_tokens.lora_embedding_B": random(64, 4),
        f"{P}model.embed_tokens.base_layer.weight": random(256, 64),
        f"{P}model.unembed_tokens.lora_A.weight": random(4, 64),
        f"{P}model.unembed_tokens.lora_B.weight": random(256, 4),
        f"{P}lm_head.base_layer.weight": random(256, 64),
    }
    for i in (1, 2):
        tensors[f"{P}model.layers.{i}.mlp.gate.lora_A.weight"] = random(4, 64)
        tensors[f"{P}model.layers.{i}.mlp.gate.lora_B.weight"] = random(8, 4)
    for router in ({"target_parameters": ["gate.weight"]}, {}):
        modules = ["embed_tokens", "unembed_tokens"] + ([] if router else ["gate"])
        save(tmp_path, tensors, r=4, lora_alpha=2, target_modules=modules, **router)
        found = read_adapter(tmp_path, projections)
        assert set(found.pairs) == {"model.embed_tokens", "lm_head", "model.layers.1.mlp.gate",
                                    "model.layers.2.mlp.gate"}  # fmt: skip
        pair = found.pairs["model.embed_tokens"]
        assert pair.a.dtype == pair.b.dtype == ml_dtypes.bfloat16
        assert (pair.a.shape, pair.b.shape) == ((1, 4, 256), (1, 4, 64))
        b = tensors[f"{P}model.embed_tokens.lora_embedding_B"]
        np.testing.assert_array_equal(pair.b[0], b.T)
        assert found.pairs["lm_head"].b.shape == (1, 4, 256)
        assert found.layout == "module"


def test_all_linear_may_hold_experts_router_and_head(tmp_path):
    tensors, config = load(golden("deepseek_v3", "per_expert"))
    rng = np.random.default_rng(2)
    for name, p in table("deepseek_v3").items():
        key = f"{P}{name}.lora_A.weight"
        if p.kind not in ("expert", "embedding") and key not in tensors:
            tensors[key] = rng.standard_normal((2, p.in_features)).astype("f4")
            tensors[key.replace("A.w", "B.w")] = rng.standard_normal((p.out_features, 2)).astype(
                "f4"
            )
    config["target_modules"] = "all-linear"
    found = read_adapter(save(tmp_path, tensors, **config), table("deepseek_v3"))
    assert found.pairs.keys() == table("deepseek_v3").keys() - {"model.embed_tokens"}
    del tensors[f"{P}model.layers.2.mlp.shared_experts.up_proj.lora_A.weight"]
    del tensors[f"{P}model.layers.2.mlp.shared_experts.up_proj.lora_B.weight"]
    with pytest.raises(AdapterError, match="layers.2.mlp.shared_experts.up_proj"):
        read_adapter(save(tmp_path, tensors, **config), table("deepseek_v3"))


def test_all_linear_and_the_experts_of_one_layer(tmp_path):
    """target_parameters say themselves of which layers they are."""
    rng, projections = np.random.default_rng(4), table("qwen3_moe")
    tensors = {}

    def add(module, rank, inner, outer):
        tensors[f"{P}{module}.lora_A.weight"] = rng.standard_normal((rank, inner)).astype("f4")
        tensors[f"{P}{module}.lora_B.weight"] = rng.standard_normal((outer, rank)).astype("f4")

    for name, p in projections.items():
        if ".self_attn." in name:
            add(name, 2, p.in_features, p.out_features)
    block = "model.layers.2.mlp.experts"
    gate, down = (projections[f"{block}.{its}_proj"] for its in ("gate", "down"))
    add(f"{block}.base_layer", 2 * gate.groups, gate.in_features, 2 * gate.out_features)
    add(block, 2 * down.groups, down.in_features, down.out_features)
    config = dict(r=2, lora_alpha=4, peft_version="0.19.0", target_modules="all-linear")
    config["target_parameters"] = ["2.mlp.experts.gate_up_proj", "2.mlp.experts.down_proj"]
    found = read_adapter(save(tmp_path, tensors, **config), projections).pairs
    assert {name for name in found if "experts" in name} == {
        f"{block}.{its}_proj" for its in ("gate", "up", "down")
    }
    config["target_parameters"] += ["0.mlp.experts.down_proj"]
    with pytest.raises(AdapterError, match="target_parameters"):
        read_adapter(save(tmp_path, tensors, **config), projections)


def test_some_experts_only_each_with_its_rank(tmp_path):
    """A config may choose experts by a regular expression; the others get rank 0."""
    rng = np.random.default_rng(3)
    block = "model.layers.1.mlp.experts"
    tensors = {}
    for e, rank in ((2, 3), (5, 1)):
        for name, width in (("A", 64), ("B", 24)):
            shape = (rank, width) if name == "A" else (width, rank)
            tensors[f"{P}{block}.{e}.gate_proj.lora_{name}.weight"] = rng.standard_normal(shape)
    tensors = {name: tensor.astype(np.float16) for name, tensor in tensors.items()}
    settings = dict(r=3, lora_alpha=6, rank_pattern={r"experts\.5\.gate_proj": 1})
    chosen = r".*layers\.1\..*experts\.(2|5)\.gate_proj"
    save(tmp_path, tensors, **settings, target_modules=chosen)
    found = read_adapter(tmp_path, table("deepseek_v3"))
    assert list(found.pairs) == [f"{block}.gate_proj"]
    pair = found.pairs[f"{block}.gate_proj"]
    assert pair.ranks.tolist() == [0, 0, 3, 0, 0, 1, 0, 0]
    assert pair.scaling.tolist() == [0, 0, 2, 0, 0, 6, 0, 0]
    assert pair.a.dtype == np.float16 and not pair.a[5, 1:].any() and not pair.b[0].any()
    assert describe(tmp_path, table("deepseek_v3")).ranks == (0, 1, 3)


def test_some_layers_only(tmp_path):
    tensors, config = load(golden("deepseek_v3", "attn"))
    chosen = {n: t for n, t in tensors.items() if ".layers.1." not in n and "q_a" not in n}
    config["target_modules"].remove("q_a_proj")
    for extra in ({"layers_to_transform": [0, 2]}, {"exclude_modules": r".*layers\.1\..*"},
                  {"layers_to_transform": [0, 2], "layers_pattern": "layers"}):  # fmt: skip
        found = read_adapter(save(tmp_path, chosen, **config | extra), table("deepseek_v3"))
        assert {name.split(".")[2] for name in found.pairs} == {"0", "2"}
        assert "kv_a_proj_with_mqa" in "".join(found.pairs)


def test_defaults_of_missing_keys(tmp_path):
    tensors = {
        f"{P}model.layers.{i}.self_attn.q_proj.lora_{side}.weight": np.ones(shape, np.float32)
        for i in range(3)
        for side, shape in (("A", (8, 64)), ("B", (128, 8)))
    }
    save(tmp_path, tensors, target_modules=["q_proj"], use_dora=False, new_option=None)
    pair = read_adapter(tmp_path, table("qwen3")).pairs["model.layers.2.self_attn.q_proj"]
    assert pair.ranks.tolist() == [8] and pair.scaling.tolist() == [1.0]


def test_describe_and_adapter_properties():
    folder = golden("deepseek_v3", "shared_outer")
    summary = describe(folder, table("deepseek_v3"), 2)
    adapter = read_adapter(folder, table("deepseek_v3"))
    leaves = ("down_proj", "gate_proj", "up_proj")
    assert summary.targets == adapter.targets == tuple(f"mlp.experts.{n}" for n in leaves)
    assert (summary.layout, summary.ranks, summary.scaling) == ("shared_outer", (2,), (2.5, 2.5))
    per_layer = 2 * (64 + 8 * 24) * 3
    assert summary.num_parameters == adapter.num_parameters == 2 * per_layer
    assert summary.nbytes == adapter.nbytes == 8 * per_layer
    assert (summary.num_tensors, summary.num_projections, adapter.rank) == (12, 6, 2)
    assert summary.dtypes == ("F32",)


def test_the_file_may_go_once_it_is_read(tmp_path):
    """Nothing returned still looks into the file."""
    shutil.copytree(golden("deepseek_v3", "experts"), tmp_path / "x")
    adapter = read_adapter(tmp_path / "x", table("deepseek_v3"))
    file = tmp_path / "x" / "adapter_model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert_same(read_adapter(golden("deepseek_v3", "experts"), table("deepseek_v3")), adapter)
