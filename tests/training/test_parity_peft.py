"""The golden losses and gradients are torch's: of PEFT's modules, and by autograd of the experts'
own copies for the factors that they share, which PEFT cannot.

Needs torch, transformers and peft. `python -m tests.training.test_parity_peft` writes them.
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lora_moe_jax.adapters import Adapter, AdapterConfig, LoraPair, write_adapter
from tests.adapters.tables import FAMILIES, GOLDEN, table
from tests.training.golden_gradients import SHARED_FAMILIES, adapter, compare, file, sequences

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
TOLERANCE = 1e-5  # of a factor's largest gradient
STEP, SLOPE_TOLERANCE = 1e-4, 1e-5  # of a central difference; of a factor's whole gradient
CASES = [*((family, False) for family in FAMILIES), *((family, True) for family in SHARED_FAMILIES)]
EXPERTS = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("family, shared", CASES)
def test_gradients_of_torch(family, shared):
    compare(family, shared, gradients(family, shared), TOLERANCE)


@pytest.mark.parametrize("family, shared", CASES)
def test_gradients_are_slopes(monkeypatch, family, shared):
    """Against central differences in float64, kind by kind of projection."""
    import torch

    model, pairs = base_model(family).double(), adapter(family, shared)
    # In many places the models compute in float32 whatever the dtype of their weights is.
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    factors = {
        name: [torch.from_numpy(x).double() for x in (pair.a, pair.b)]
        for name, pair in pairs.items()
    }

    def value() -> float:
        with torch.no_grad():
            return loss_of(family, merged(family, model, pairs, factors)).item()

    golden = load_file(file(family, shared))
    np.testing.assert_allclose(golden.pop("loss"), value(), rtol=1e-6)
    kinds = defaultdict(list)
    for key in golden:
        kinds[re.sub(r"layers\.\d+\.", "", key)].append(key)
    for kind, keys in kinds.items():
        gradient = np.concatenate([golden[key].ravel() for key in keys]).astype(np.float64)
        # Along itself the gradient shows its size, along any other direction what it lacks.
        other = np.random.default_rng(0).standard_normal(len(gradient))
        norm = np.linalg.norm(gradient)
        direction = gradient / norm + other / np.linalg.norm(other)
        parts = np.split(direction, np.cumsum([golden[key].size for key in keys])[:-1])

        def move(step: float, parts=parts, keys=keys) -> None:
            for key, part in zip(keys, parts, strict=True):
                factor = factors[key[:-2]][key.endswith("b")]
                factor += step * torch.from_numpy(part.reshape(factor.shape))

        move(STEP)
        above = value()
        move(-2 * STEP)
        slope = (above - value()) / (2 * STEP)
        move(STEP)
        error = abs(slope - gradient @ direction) / norm
        assert error <= SLOPE_TOLERANCE, (kind, error)


def gradients(family: str, shared: bool) -> dict[str, np.ndarray]:
    return of_shared(family) if shared else of_peft(family)


def of_peft(family: str) -> dict[str, np.ndarray]:
    """PEFT fuses gate and up to one pair of twice the rank: the one's factors, then the other's."""
    from peft import PeftModel
    from peft.tuners.lora.layer import Embedding, LoraLayer, ParamWrapper

    with tempfile.TemporaryDirectory() as folder:
        whole = Adapter(adapter(family, False), "module", AdapterConfig())
        write_adapter(f"{folder}/a", whole, table(family), layout="peft")
        model = PeftModel.from_pretrained(base_model(family), f"{folder}/a", is_trainable=True)
    loss = backward(family, model)
    found = {}
    for path, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        name = path.removeprefix("base_model.model.").replace(".base_layer", "")
        if isinstance(module, Embedding):
            factors = module.lora_embedding_A["default"], module.lora_embedding_B["default"]
        else:
            factors = module.lora_A["default"].weight, module.lora_B["default"].weight
        a, b = (factor.grad.numpy() for factor in factors)
        groups = module.num_experts if isinstance(module, ParamWrapper) else 1
        a, b = a.reshape(groups, -1, a.shape[1]), b.reshape(len(b), -1, groups).transpose(2, 1, 0)
        if groups == 1:
            found[name] = a, b
        elif module.parameter_name == "down_proj":
            found[f"{name}.down_proj"] = a, b
        else:
            rank, (gate, up) = a.shape[1] // 2, gate_and_up(family, b)
            found[f"{name}.gate_proj"] = a[:, :rank], gate[:, :rank]
            found[f"{name}.up_proj"] = a[:, rank:], up[:, rank:]
    return flat(loss, found)


def gate_and_up(family: str, b: np.ndarray) -> list[np.ndarray]:
    """Their columns of one factor."""
    if family == "gpt_oss":
        return [b[..., 0::2], b[..., 1::2]]
    return np.split(b, 2, axis=-1)


def of_shared(family: str) -> dict[str, np.ndarray]:
    """The products of factors are added to the experts' weights."""
    import torch

    model, pairs = base_model(family), adapter(family, True)
    factors = {
        name: tuple(torch.tensor(x, requires_grad=True) for x in (pair.a, pair.b))
        for name, pair in pairs.items()
    }
    loss = backward(family, merged(family, model, pairs, factors))
    return flat(loss, {name: [x.grad.numpy() for x in pair] for name, pair in factors.items()})


def merged(family: str, model, pairs: dict[str, LoraPair], factors: dict) -> Callable:
    """The model with the products of these factors, at the pairs' scalings, in its weights."""
    import torch

    base, kinds, deltas = dict(model.named_parameters()), table(family), {}
    for name, (a, b) in factors.items():
        scaling = torch.from_numpy(pairs[name].scaling)[:, None, None]
        deltas[name] = scaling * (b.transpose(1, 2) @ a)  # [groups, out, in]
    weights = {}
    for name, delta in deltas.items():
        if kinds[name].kind == "expert":
            block = name.rpartition(".")[0]
            gate, up, down = (deltas[f"{block}.{leaf}"] for leaf in EXPERTS)
            fused, last = f"{block}.gate_up_proj", f"{block}.down_proj"
            if kinds[name].interleaved:
                both, down = torch.stack([gate, up], 2).flatten(1, 2).mT, down.mT
            else:
                both = torch.cat([gate, up], 1)
            weights[fused], weights[last] = base[fused] + both, base[last] + down
        else:
            key, own = f"{name}.weight", delta[0]
            weights[key] = base[key] + (own.T if kinds[name].kind == "embedding" else own)
    return lambda **inputs: torch.func.functional_call(model, weights, (), inputs)


def base_model(family: str):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        GOLDEN / family / "base",
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()


def backward(family: str, model: Callable) -> float:
    """The batch's cross-entropy, whose gradients are then where torch has them."""
    loss = loss_of(family, model)
    loss.backward()
    return loss.item()


def loss_of(family: str, model: Callable):
    import torch

    ids, weights = map(torch.from_numpy, sequences(family))
    logprobs = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    return -(weights * logprobs.gather(-1, ids[:, 1:, None])[..., 0]).sum()


def flat(loss: float, factors: dict) -> dict[str, np.ndarray]:
    found = {"loss": np.float32([loss])}
    for name, (a, b) in factors.items():
        found |= {f"{name}.a": np.ascontiguousarray(a), f"{name}.b": np.ascontiguousarray(b)}
    return found


if __name__ == "__main__":
    for case in CASES:
        save_file(gradients(*case), file(*case))
