"""The golden losses and gradients are torch's: of PEFT's modules, and by autograd of the experts'
own copies for the factors that they share, which PEFT cannot.

Needs torch, transformers and peft. `python -m tests.training.test_parity_peft` writes them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import numpy as np
import pytest

from lora_moe_jax.adapters import Adapter, AdapterConfig, write_adapter
from tests.adapters.tables import FAMILIES, GOLDEN, table
from tests.training.golden_gradients import SHARED_FAMILY, adapter, compare, file, sequences

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
TOLERANCE = 1e-5  # of a factor's largest gradient
CASES = [*((family, False) for family in FAMILIES), (SHARED_FAMILY, True)]
EXPERTS = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("family, shared", CASES)
def test_gradients_of_torch(family, shared):
    compare(family, shared, gradients(family, shared), TOLERANCE)


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
            rank, width = a.shape[1] // 2, b.shape[2] // 2
            found[f"{name}.gate_proj"] = a[:, :rank], b[:, :rank, :width]
            found[f"{name}.up_proj"] = a[:, rank:], b[:, rank:, width:]
    return flat(loss, found)


def of_shared(family: str) -> dict[str, np.ndarray]:
    """The products of factors are added to the experts' weights."""
    import torch

    model, pairs = base_model(family), adapter(family, True)
    factors = {
        name: tuple(torch.tensor(x, requires_grad=True) for x in (pair.a, pair.b))
        for name, pair in pairs.items()
    }

    def delta(name: str):
        (a, b), scaling = factors[name], torch.from_numpy(pairs[name].scaling)
        return scaling[:, None, None] * (b.transpose(1, 2) @ a)  # [experts, out, in]

    base = dict(model.named_parameters())
    weights = {}
    for block in sorted({name.rpartition(".")[0] for name in pairs}):
        gate, up, down = (delta(f"{block}.{name}") for name in EXPERTS)
        fused, last = f"{block}.gate_up_proj", f"{block}.down_proj"
        weights |= {fused: base[fused] + torch.cat([gate, up], 1), last: base[last] + down}

    def run(**inputs):
        return torch.func.functional_call(model, weights, (), inputs)

    loss = backward(family, run)
    return flat(loss, {name: [x.grad.numpy() for x in pair] for name, pair in factors.items()})


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
    import torch

    ids, weights = map(torch.from_numpy, sequences(family))
    logprobs = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    loss = -(weights * logprobs.gather(-1, ids[:, 1:, None])[..., 0]).sum()
    loss.backward()
    return loss.item()


def flat(loss: float, factors: dict) -> dict[str, np.ndarray]:
    found = {"loss": np.float32([loss])}
    for name, (a, b) in factors.items():
        found |= {f"{name}.a": np.ascontiguousarray(a), f"{name}.b": np.ascontiguousarray(b)}
    return found


if __name__ == "__main__":
    from safetensors.numpy import save_file

    for case in CASES:
        save_file(gradients(*case), file(*case))
