"""The tensors of a model: their canonical names and shapes, and how files name the experts.

Canonical names are those of the Hugging Face hub, except that the experts of a layer are two
stacked tensors, whatever the layout of the files:

    model.layers.{i}.mlp.experts.gate_up_proj   [E, 2, I, H]   [:, 0] is gate, [:, 1] is up
    model.layers.{i}.mlp.experts.down_proj      [E, H, I]

Files have either one 2D tensor per expert and projection (the hub), or the two stacked ones with
gate and up joined in one axis, [E, 2I, H] (transformers 5 in memory). gpt-oss has forms of its own:
`checkpoint.interleaved`.
"""

from __future__ import annotations

from lora_moe_jax.config.model import ModelConfig

Shapes = dict[str, tuple[int, ...]]
_GATE_UP = ".mlp.experts.gate_up_proj"
_DOWN = ".mlp.experts.down_proj"


def expected_tensors(config: ModelConfig) -> Shapes:
    """The canonical name and shape of every tensor of the model, in the order of the network."""
    hidden = config.hidden_size
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        attention = _mla_tensors(config) if config.mla else _gqa_tensors(config)
        for name, shape in attention.items():
            shapes[f"{prefix}self_attn.{name}"] = shape
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        mlp = (
            _moe_tensors(config)
            if config.is_sparse(layer)
            else _mlp_tensors(hidden, config.intermediate_size)
        )
        for name, shape in mlp.items():
            shapes[f"{prefix}mlp.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def is_interleaved(name: str, config: ModelConfig) -> bool:
    """Whether a canonical name is an expert tensor of a model whose files have them interleaved."""
    return config.moe is not None and config.moe.interleaved and ".mlp.experts." in name


def is_stacked(name: str) -> bool:
    """Whether a canonical name is one of the two stacked expert tensors of a layer."""
    return name.endswith((_GATE_UP, _DOWN))


def fused_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a stacked tensor in files that have it in one piece, under the same name."""
    if name.endswith(_GATE_UP):
        experts, two, inner, hidden = shape
        return (experts, two * inner, hidden)
    return shape


def per_expert_names(name: str, num_experts: int) -> list[tuple[str, ...]]:
    """For each expert, the hub's names of the 2D tensors that a stacked tensor consists of."""
    prefix = name.rsplit(".", 1)[0]
    leaves = ("gate_proj", "up_proj") if name.endswith(_GATE_UP) else ("down_proj",)
    return [
        tuple(f"{prefix}.{expert}.{leaf}.weight" for leaf in leaves)
        for expert in range(num_experts)
    ]


def _gqa_tensors(config: ModelConfig) -> Shapes:
    hidden, width = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * width, config.num_kv_heads * width
    shapes: Shapes = {}
    if config.qk_norm:
        shapes |= {"q_norm.weight": (width,), "k_norm.weight": (width,)}
    if config.sinks:
        shapes["sinks"] = (config.num_heads,)
    for name, size in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        shapes |= _linear(name, hidden, size, config.attention_bias)
    return shapes | _linear("o_proj", queries, hidden, config.attention_bias)


def _mla_tensors(config: ModelConfig) -> Shapes:
    mla, hidden, heads = config.mla, config.hidden_size, config.num_heads
    bias = config.attention_bias
    queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        shapes = _linear("q_proj", hidden, queries)
    else:
        shapes = _linear("q_a_proj", hidden, mla.q_lora_rank, bias)
        shapes["q_a_layernorm.weight"] = (mla.q_lora_rank,)
        shapes |= _linear("q_b_proj", mla.q_lora_rank, queries)
    latent = mla.kv_lora_rank
    shapes |= _linear("kv_a_proj_with_mqa", hidden, latent + mla.qk_rope_head_dim, bias)
    shapes["kv_a_layernorm.weight"] = (latent,)
    shapes |= _linear("kv_b_proj", latent, heads * (mla.qk_nope_head_dim + mla.v_head_dim))
    return shapes | _linear("o_proj", heads * mla.v_head_dim, hidden, bias)


def _moe_tensors(config: ModelConfig) -> Shapes:
    moe, hidden = config.moe, config.hidden_size
    experts, inner = moe.num_experts, moe.expert_size
    shapes = _linear(moe.router, hidden, experts, moe.bias)
    if moe.correction_bias:
        shapes[f"{moe.router}.e_score_correction_bias"] = (experts,)
    shapes["experts.gate_up_proj"] = (experts, 2, inner, hidden)
    shapes["experts.down_proj"] = (experts, hidden, inner)
    if moe.bias:
        shapes["experts.gate_up_proj_bias"] = (experts, 2, inner)
        shapes["experts.down_proj_bias"] = (experts, hidden)
    if moe.shared_size:
        shared = _mlp_tensors(hidden, moe.shared_size)
        shapes |= {f"shared_experts.{name}": shape for name, shape in shared.items()}
    return shapes


def _mlp_tensors(hidden: int, inner: int) -> Shapes:
    gate, up = _linear("gate_proj", hidden, inner), _linear("up_proj", hidden, inner)
    return gate | up | _linear("down_proj", inner, hidden)


def _linear(name: str, n_in: int, n_out: int, bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (n_out, n_in)}
    if bias:
        shapes[f"{name}.bias"] = (n_out,)
    return shapes
