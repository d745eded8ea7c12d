"""Which tensors a drafter of a configuration has, and which of its matrices may be packed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .layouts import filled, has_reduced_vocabulary

if TYPE_CHECKING:
    from ..configuration_eagle31 import Eagle31Config

FUSED_PROJECTIONS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Our matrix: the published ones it stacks, top row first."""


def expected_shapes(config: Eagle31Config) -> dict[str, tuple[int, ...]]:
    """Canonical name to shape of every tensor a drafter of this configuration has, `d2t` included."""
    hidden, target_hidden = config.hidden_size, filled(config.target_hidden_size)
    fused_width = config.num_aux_hidden_states * target_hidden
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, fused_width), "norm.weight": (hidden,)}
    if config.fc_bias:
        shapes["fc.bias"] = (hidden,)
    if config.aux_norm == "per_slot":
        shapes |= {f"fc_norm.{i}.weight": (target_hidden,) for i in range(config.num_aux_hidden_states)}
    if config.aux_norm == "concatenated":
        shapes["input_norm.weight"] = (fused_width,)
    for layer in range(config.num_hidden_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(config, layer).items()}
    if config.own_lm_head:
        shapes["lm_head.weight"] = (filled(config.draft_vocab_size), hidden)
    if config.own_embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
    if has_reduced_vocabulary(config):
        shapes["d2t"] = (filled(config.draft_vocab_size),)
    return shapes


def _layer_shapes(config: Eagle31Config, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    read = 2 * hidden if layer == 0 else hidden  # [embedding ; hidden] enters the first layer
    attention = _latent_shapes(config, read) if config.is_latent else _grouped_shapes(config, read)
    shapes = {f"self_attn.{name}": shape for name, shape in attention.items()}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes |= {f"mlp.{p}_proj.weight": shape for p, shape in mlp.items()}
    if config.mlp_bias:
        shapes |= {f"mlp.{p}_proj.bias": shape[:1] for p, shape in mlp.items()}
    norms = ("hidden_norm", "input_layernorm") if layer == 0 else ("input_layernorm",)
    return shapes | {f"{norm}.weight": (hidden,) for norm in (*norms, "post_attention_layernorm")}


def _grouped_shapes(config: Eagle31Config, read: int) -> dict[str, tuple[int, ...]]:
    """Attention with query, key and value heads, reading rows `read` wide."""
    hidden, head_dim = config.hidden_size, filled(config.head_dim)
    query, key = config.num_attention_heads * head_dim, filled(config.num_key_value_heads) * head_dim
    matrices = {"q": (query, read), "k": (key, read), "v": (key, read), "o": (hidden, query)}
    shapes: dict[str, tuple[int, ...]] = {f"{p}_proj.weight": shape for p, shape in matrices.items()}
    if config.attention_bias:
        shapes |= {f"{p}_proj.bias": shape[:1] for p, shape in matrices.items()}
    if config.qk_norm:
        shapes |= {f"{p}_norm.weight": (head_dim,) for p in ("q", "k")}
    return shapes


def _latent_shapes(config: Eagle31Config, read: int) -> dict[str, tuple[int, ...]]:
    """DeepSeek's latent attention, reading rows `read` wide."""
    heads, rank, query_rank = config.num_attention_heads, filled(config.kv_lora_rank), config.q_lora_rank
    plain, rotated = filled(config.qk_nope_head_dim), filled(config.qk_rope_head_dim)
    query, value = heads * (plain + rotated), filled(config.v_head_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (rank + rotated, read),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (plain + value), rank),
        "o_proj.weight": (config.hidden_size, heads * value),
    }
    if query_rank is None:
        return shapes | {"q_proj.weight": (query, read)}
    shapes |= {"q_a_proj.weight": (query_rank, read), "q_a_layernorm.weight": (query_rank,)}
    return shapes | {"q_b_proj.weight": (query, query_rank)}


def packable_shapes(config: Eagle31Config) -> dict[str, tuple[int, int]]:
    """Every matrix that may be packed, `(rows, columns)` by the name it has in the network.

    That is attention, MLP and the draft head. `fc` reads the target's hidden states, where a few large entries would
    take all the precision, and is one matrix product per accepted token; norms and embedding are no products at all.
    Latent attention multiplies with parts of `kv_b_proj`'s weight itself, which packed numbers do not have.
    """
    fused = {part: whole for whole, parts in FUSED_PROJECTIONS.items() for part in parts}
    if config.is_latent:  # its queries stand alone
        fused = {part: whole for part, whole in fused.items() if not part.startswith("self_attn.")}
    shapes: dict[str, tuple[int, int]] = {}
    for name, shape in expected_shapes(config).items():
        module = name.removesuffix(".weight")
        if len(shape) != 2 or module in ("fc", "embed_tokens") or module.endswith("kv_b_proj"):
            continue
        part = ".".join(module.split(".")[2:])  # in its layer
        module = module.removesuffix(part) + fused.get(part, part)
        above = shapes[module][0] if module in shapes else 0
        shapes[module] = (above + shape[0], shape[1])
    return shapes


def published_weights(module: str) -> list[str]:
    """Canonical names of the weights that the packed matrix `module` stands for."""
    for fused, parts in FUSED_PROJECTIONS.items():
        if module.endswith(fused):
            return [f"{module.removesuffix(fused)}{part}.weight" for part in parts]
    return [f"{module}.weight"]
