"""What a drafter's weights are. Run-time settings (draft length, tree) live on `generation_config`, never here."""

from __future__ import annotations

import math

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .errors import ConfigurationError, shown

AUX_NORMS = ("none", "per_slot", "concatenated")
ROPE_TYPES = ("default", *ROPE_INIT_FUNCTIONS)

# Far above every published model. Modules and tables of these sizes are made before a file shows whether it fills them.
LARGEST_SIZES = {"num_aux_hidden_states": 256, "num_hidden_layers": 256, "head_dim": 1 << 14, "vocab_size": 1 << 24}

# A fine-tune adds a few tokens, or pads its vocabulary to whole blocks. More are another tokenizer's: Mistral's third
# has 768 more than its first, and other tokens under most ids.
MOST_ADDED_TOKENS = 512


@strict
class Eagle31Config(LlamaConfig):
    """Shape and variant of an EAGLE-3 or EAGLE 3.1 drafter.

    Everything a Llama decoder layer needs is inherited from `LlamaConfig` (`hidden_size`, `head_dim`,
    `rope_parameters`, `rms_norm_eps`, ...) and describes the *drafter's* layers. Beside it:

    Args:
        vocab_size: the target's vocabulary `V`; ids the drafter reads are target ids.
        draft_vocab_size: rows `Vd` of the draft head; `None` means `V` (no `d2t` map).
        target_hidden_size: width `Ht` of the target's hidden states; `None` means `hidden_size`.
        aux_layers: which hidden states of the target are read, as `hs` indices: `hs[k]` is the residual stream
            entering decoder layer `k` (`hs[0]` = embedding, `hs[L]` = after the last layer, before the final norm).
            `None` means the published default `2, L//2, L-3` for a target of `L` layers.
        num_aux_hidden_states: how many of them, `A`.
        aux_norm: norm before `fc`: `"none"` (EAGLE-3), `"per_slot"` (EAGLE 3.1 `fc_norm`: one RMSNorm per state) or
            `"concatenated"` (`norm_before_fc`: one RMSNorm over the `A * Ht` wide concatenation).
        norm_output: feed back the post-norm hidden state (EAGLE 3.1) instead of the pre-norm one (EAGLE-3).
        norm_before_residual: the first layer's residual branch starts from the normed hidden state.
        qk_norm: RMSNorm on query and key heads (Qwen3 block).
        fc_bias: bias on `fc`.
        kv_lora_rank: width of the latent that keys and values are made of (DeepSeek's MLA); `None`: attention with keys
            and values of their own. With it come `q_lora_rank` (`None`: queries are made in one go),
            `qk_nope_head_dim`, `qk_rope_head_dim` and `v_head_dim`, and `head_dim` is the rotated width.
        sliding_window: positions each layer sees back, its own included; `None`: all of them.
        own_embedding: the checkpoint holds its own `embed_tokens`; otherwise the target's is shared.
        own_lm_head: the checkpoint holds its own draft head; otherwise the target's head (or its draft rows) is used.

    Raises:
        ConfigurationError: a field contradicts another; the message names both.
    """

    model_type = "eagle31"

    num_hidden_layers: int = 1
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    aux_layers: list[int] | tuple[int, ...] | None = None
    num_aux_hidden_states: int = 3
    aux_norm: str = "none"
    norm_output: bool = False
    norm_before_residual: bool = False
    qk_norm: bool = False
    fc_bias: bool = False
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    sliding_window: int | None = None
    own_embedding: bool = False
    own_lm_head: bool = True

    def __post_init__(self, **kwargs):
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.aux_layers is not None:
            self.aux_layers = list(self.aux_layers)
        if self.is_latent:
            self.head_dim = self.qk_rope_head_dim  # the width of rotary tables, as in DeepseekV3Config
        super().__post_init__(**kwargs)
        self._check_fields()

    def validate_architecture(self):
        """Replaces Llama's rule that heads divide `H`: published drafters set `head_dim` freely."""

    def _check_fields(self) -> None:
        self._require(self.aux_norm in AUX_NORMS, f"aux_norm is {shown(self.aux_norm)}; wanted one of {AUX_NORMS}")
        latent = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim") if self.is_latent else ()
        window = () if self.sliding_window is None else ("sliding_window",)
        for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
                      "num_key_value_heads", "vocab_size", "draft_vocab_size", "target_hidden_size",
                      "num_aux_hidden_states", "max_position_embeddings", *latent, *window):  # fmt: skip
            value = getattr(self, field)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            self._require(is_whole and value >= 1, f"{field} is {shown(value)}; wanted a whole number, at least 1")
        self._check_bounds()
        self._require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"num_attention_heads={self.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={self.num_key_value_heads}",
        )
        self._require(
            self.draft_vocab_size <= self.vocab_size,
            f"draft_vocab_size={self.draft_vocab_size} is larger than vocab_size={self.vocab_size}",
        )
        self._require(
            self.target_hidden_size == self.hidden_size or (self.own_embedding and self.own_lm_head),
            f"target_hidden_size={self.target_hidden_size} differs from hidden_size={self.hidden_size}, so neither the "
            "target's embedding nor its LM head can be shared: own_embedding and own_lm_head must be true, and the "
            "checkpoint must hold embed_tokens and lm_head",
        )
        if self.aux_layers is not None:
            self._require(
                len(self.aux_layers) == self.num_aux_hidden_states
                and all(type(layer) is int and layer >= 0 for layer in self.aux_layers),
                f"aux_layers={self.aux_layers}; wanted {self.num_aux_hidden_states} whole numbers, none negative",
            )

    def _check_bounds(self) -> None:
        for field, most in LARGEST_SIZES.items():
            self._require(getattr(self, field) <= most, f"{field} is {getattr(self, field)}; wanted at most {most}")
        for field in ("rms_norm_eps", "initializer_range"):
            value = getattr(self, field)
            self._require(math.isfinite(value) and value >= 0, f"{field} is {value}; wanted a number, not negative")
        self._require(
            self.hidden_act in ACT2FN,
            f"hidden_act is {shown(self.hidden_act)}; wanted one that transformers has: {', '.join(ACT2FN)}",
        )
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        self._require(
            rope_type in ROPE_TYPES,
            f"rope_type is {shown(rope_type)}; wanted one that transformers has: {', '.join(ROPE_TYPES)}",
        )

    @staticmethod
    def _require(condition: bool, message: str) -> None:
        if not condition:
            raise ConfigurationError(message)

    @property
    def is_eagle31(self) -> bool:
        """True for the drift-resistant form: normed aux states and post-norm feedback (arXiv 2605.09992)."""
        return self.aux_norm != "none" and self.norm_output

    @property
    def is_latent(self) -> bool:
        """True for DeepSeek's latent attention (MLA), false for grouped-query attention."""
        return self.kv_lora_rank is not None

    @property
    def has_reduced_vocabulary(self) -> bool:
        """`Vd < V`: the draft head has rows for some target ids only, and a `d2t` map says which."""
        return self.draft_vocab_size < self.vocab_size

    def knows_vocabulary_of(self, rows: int) -> bool:
        """Whether a target with so many tokens has this drafter's, and at most a few that were added behind them."""
        return 0 <= rows - self.vocab_size <= MOST_ADDED_TOKENS

    def resolve_aux_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """`hs` indices for a target of `num_target_layers` layers (see `aux_layers`).

        Raises:
            ConfigurationError: an index does not exist in such a target, or there is no default for this many states.
        """
        if self.aux_layers is not None:
            layers = tuple(self.aux_layers)
        elif self.num_aux_hidden_states == 3:
            layers = (2, num_target_layers // 2, num_target_layers - 3)
        else:
            raise ConfigurationError(
                f"num_aux_hidden_states={self.num_aux_hidden_states} has no default layers; set aux_layers explicitly"
            )
        outside = [k for k in layers if not 0 <= k <= num_target_layers]
        self._require(
            not outside,
            f"aux_layers={list(layers)} asks for {outside}, but a target of {num_target_layers} layers has hidden "
            f"states 0..{num_target_layers}; use a drafter made for this target or set aux_layers",
        )
        return layers


@strict
class MtpConfig(Eagle31Config):
    """A multi-token-prediction head that a target's checkpoint holds, read as a drafter.

    Its layers are of the target's own class. What that class needs to know is the target's text configuration, cut to
    the head's layers (`block`); fields of `Eagle31Config` say what the drafting loop asks.

    Args:
        family: `model_type` of the target's text configuration.
        block: the text configuration of a decoder that has the head's layers only, as a dictionary.
        normed_state: the state that is read is the one behind the target's final norm, else the one before it.
            `norm_output` says the same of what is fed back.
    """

    model_type = "eagle31_mtp"

    family: str = ""
    block: dict | None = None
    normed_state: bool = True

    def __post_init__(self, **kwargs):
        self.num_aux_hidden_states = 1
        super().__post_init__(**kwargs)

    def resolve_aux_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """One state: `hs[L + 1]`, behind the target's final norm, or `hs[L]` before it."""
        return (num_target_layers + int(self.normed_state),)

    def layers_config(self) -> PreTrainedConfig:
        """The text configuration of a decoder that has the head's layers and no others."""
        assert self.block is not None, "a head's configuration is made from its target's"
        fields = {name: value for name, value in self.block.items() if name != "model_type"}
        return AutoConfig.for_model(self.block["model_type"], **fields)


for _config in (Eagle31Config, MtpConfig):
    AutoConfig.register(_config.model_type, _config)

__all__ = ["Eagle31Config", "MtpConfig"]
