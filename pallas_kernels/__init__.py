"""Grouped low-rank matrix products, paged attention and row reductions, in JAX.

Each operation has a folder: `api.py` (the public function and its contract), `reference.py` (the
obviously correct definition that tests compare against), `xla.py` (plain JAX, runs everywhere).
This package depends on JAX alone.
"""

from pallas_kernels.grouped_lora_matmul.api import grouped_lora_matmul, lora_matmul
from pallas_kernels.grouped_lora_matmul.gate import Gate
from pallas_kernels.grouped_lora_matmul.lora import Lora, Slots
from pallas_kernels.grouped_lora_matmul.normed import normed_lora_matmul
from pallas_kernels.head_rotation.api import rotate, rotate_and_cache
from pallas_kernels.latent_attention.api import KvB, latent_attention
from pallas_kernels.latent_rotation.api import ColumnsOf, rotate_and_cache_latents
from pallas_kernels.layered import Layered
from pallas_kernels.moe_mlp.api import moe_mlp
from pallas_kernels.moe_mlp.routed import routed_mlp
from pallas_kernels.paged_attention.api import (
    PageView,
    paged_attention,
    paged_latent_attention,
    write_pages,
)
from pallas_kernels.rotated_attention.api import rotated_attention
from pallas_kernels.routing_plan.api import RoutingPlan, combine, routing_plan
from pallas_kernels.row_reduce.api import add_norm, log_sum_exp, rms_norm, row_dot, row_sum
from pallas_kernels.top_experts.api import top_experts
from pallas_kernels.top_experts.xla import Scoring

__all__ = [
    "ColumnsOf",
    "Gate",
    "KvB",
    "Layered",
    "Lora",
    "PageView",
    "RoutingPlan",
    "Scoring",
    "Slots",
    "add_norm",
    "combine",
    "grouped_lora_matmul",
    "latent_attention",
    "log_sum_exp",
    "lora_matmul",
    "moe_mlp",
    "normed_lora_matmul",
    "paged_attention",
    "paged_latent_attention",
    "rms_norm",
    "rotate",
    "rotate_and_cache",
    "rotate_and_cache_latents",
    "rotated_attention",
    "routed_mlp",
    "routing_plan",
    "row_dot",
    "row_sum",
    "top_experts",
    "write_pages",
]
