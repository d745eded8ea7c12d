"""Everything we ask of a target model: its parts, its hidden states, one forward pass.

A target's insides are read in this folder and nowhere else: here, in `taps` and, where its weights are packed, in
`quantized`. Private names of transformers' generation code are `generate/`'s business. What is there for the sake of
one version of transformers names it, so that it can be deleted when that version is no longer supported.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..cache.attention_in_parts import is_right_on
from ..cache.grouped_attention import GROUPED, attending_grouped, decoder_of
from ..cache.shared_changes import CHANGES, leave_cudnn_out
from ..cache.speculative import SpeculativeCache
from ..cache.stock import CACHE_ARGUMENT
from ..config import MOST_ADDED_TOKENS, Eagle31Config
from ..drafting.draft_tree import DraftTree
from ..errors import IncompatibleTargetError
from .devices import precision_caution, warn_once
from .mixers import Mixers, require_mixers
from .quantized import OneTokenArithmetic, gather_head_rows, require_working_head
from .rotation import most_positions, rotates_alike_up_to
from .taps import HiddenStateTaps

OF_STATES_ALONE = "cache_params"
"""As `CACHE_ARGUMENT`: before transformers 5.24 models without attention had a name of their own for it."""


def cache_argument(model: PreTrainedModel) -> str:
    """By which name `model` takes it."""
    taken = inspect.signature(model.forward).parameters
    return OF_STATES_ALONE if CACHE_ARGUMENT not in taken and OF_STATES_ALONE in taken else CACHE_ARGUMENT


class TargetOutput(NamedTuple):
    """One target forward: `logits` `(B, n, V)` in the target's dtype, `aux` `(B, T, A*Ht)` or `None`."""

    logits: Tensor
    aux: Tensor | None


class VocabularySizes(NamedTuple):
    """Tokens that a target's config states, that its embedding has rows for, and that its head scores."""

    configured: int
    embedded: int
    logits: int


class TargetBinding:
    """A drafter's hold on one target model.

    Finds the decoder layers, taps the residual stream entering the layers the drafter reads, and lends the embedding
    and the LM head. The target's weights are never copied; nothing stays on the target but forward hooks and, around
    its recurrent layers, what records drafts (`mixers`); `close` removes both. While one of our generations runs, int8
    layers compute each token alone (`OneTokenArithmetic`).

    Args:
        target: any decoder-only transformers model with an LM head (a PEFT wrapper is looked through).
        config: the drafter's configuration; `None` without a drafter: no layer is tapped.

    Raises:
        IncompatibleTargetError: the target is of a kind that cannot be served, or does not fit the drafter.
    """

    def __init__(self, target: PreTrainedModel, config: Eagle31Config | None):
        self.model = _decoder_only(target)
        self.text_config = self.model.config.get_text_config()
        self.decoder = decoder_of(self.model)
        self.layers = _decoder_layers(self.decoder, self.text_config.num_hidden_layers)
        self.embedding: Any = self.model.get_input_embeddings()
        self.lm_head = self.model.get_output_embeddings()
        self._require_head()
        if config is not None:
            self._require_fit(config)
        self.sizes_attached = self.vocabulary_sizes()
        self.vocabulary = self.sizes_attached.logits
        self.aux_layers = () if config is None else config.resolve_aux_layers(len(self.layers))
        self.compute_dtype: torch.dtype = self.model.dtype
        self.masks_by_type: bool | None = None  # what the cache makes of the config; the self-test may know better
        self.rotates_alike_up_to = rotates_alike_up_to(self.decoder)  # tokens; `None`: any text
        self.most_positions = most_positions(self.decoder, self.text_config)  # `None`: no end to them
        self.tree_unsupported_reason = ""  # set by the self-test: why our own loop must not be used
        self.not_continued: dict[frozenset[str], str] = {}  # by what a prompt is read with: why rounds cannot go on
        self.pair: object | None = None  # the `loop.pair.Pair` of this target and its drafter
        self.draft_head: Tensor | nn.Module | None = None  # rows of the head that the drafter drafts from, if not all
        warn_once(precision_caution(self.model))
        self.one_token_arithmetic = OneTokenArithmetic(self.model)
        self.cache_argument = cache_argument(self.model)
        self.has_states = require_mixers(self.model)
        self.mixers = Mixers(self.model) if self.has_states else None
        self.taps = HiddenStateTaps(self.decoder, self.layers, self.aux_layers)
        undo = ExitStack()
        undo.callback(self.taps.close)
        if self.mixers is not None:
            undo.callback(self.mixers.let_go)
        self._undo = weakref.finalize(self, undo.close)  # once: by `close`, or for a drafter dropped without `detach`

    def _require_head(self) -> None:
        if self.lm_head is None:
            raise IncompatibleTargetError(
                f"{type(self.model).__name__} has no LM head; load the target with AutoModelForCausalLM"
            )
        require_working_head(self.lm_head, self.model.name_or_path or type(self.model).__name__)
        sizes = self.vocabulary_sizes()
        if min(sizes.embedded, sizes.logits) < sizes.configured:
            raise IncompatibleTargetError(
                f"the target's embedding has {sizes.embedded} rows and its head {sizes.logits}, fewer than its "
                f"vocabulary of {sizes.configured}; was it resized after loading? Call target.resize_token_embeddings "
                "to match its config"
            )

    def _require_fit(self, config: Eagle31Config) -> None:
        text = self.text_config
        if text.hidden_size != config.target_hidden_size:
            raise IncompatibleTargetError(
                f"the drafter was made for a target of hidden size {config.target_hidden_size}, but "
                f"{self.model.name_or_path or type(self.model).__name__} has {text.hidden_size}; "
                "use a drafter made for this target"
            )
        widths = (
            getattr(self.embedding, "embedding_dim", text.hidden_size),
            getattr(self.lm_head, "in_features", text.hidden_size),
        )
        if widths != (text.hidden_size, text.hidden_size):
            raise IncompatibleTargetError(
                f"the target projects its embedding and head (widths {widths}) to a hidden size of {text.hidden_size}, "
                "and a drafter reads them as they are; there is no drafter for such targets"
            )
        sizes = self.vocabulary_sizes()
        if not all(map(config.knows_vocabulary_of, (sizes.embedded, sizes.logits))):
            raise IncompatibleTargetError(
                f"the drafter was made for a vocabulary of {config.vocab_size} tokens, but the target has "
                f"{sizes.logits}; a drafter fits only targets with its own tokenizer and vocabulary, and up to "
                f"{MOST_ADDED_TOKENS} tokens added to them"
            )

    def vocabulary_sizes(self) -> VocabularySizes:
        """The target's, as they are now."""
        configured = self.text_config.vocab_size
        return VocabularySizes(
            configured,
            embedded=getattr(self.embedding, "num_embeddings", configured),
            logits=getattr(self.lm_head, "out_features", configured),
        )

    def head_rows(self, ids: Tensor) -> Tensor:
        """Rows `(Vd, H)` of the head, dense, of these ids `(Vd,)`."""
        return gather_head_rows(self.lm_head, ids, self.text_config.hidden_size, self.compute_dtype)

    # --- hidden states -------------------------------------------------------------------------------------------

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """While open, forwards of this thread leave their hidden states to be collected by `take_aux`."""
        try:
            with self.taps.open():
                yield
        finally:
            self.one_token_arithmetic.stop()

    def take_aux(self) -> Tensor:
        """Hidden states `(B, T, A*Ht)` of the last captured forward, low layer first, pre-norm, in the target's dtype.

        They are handed over once, so that a long prompt's states do not outlive their use.

        Raises:
            IncompatibleTargetError: the hooks did not run (the model was compiled before the drafter was attached).
        """
        return self.taps.take(self.head_device)

    # --- forward -------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | dict[str, Tensor | None] | None,
        cache: Any,
        *,
        logits_to_keep: Tensor | None = None,
    ) -> TargetOutput:
        """One pass over `input_ids` `(B, T)` at `position_ids` `(B, T)`.

        Args:
            attention_mask: additive mask(s) as the cache made them.
            logits_to_keep: columns whose logits are wanted; `None`: all. The tokens are then being verified: each is
                computed as a forward of its own would.
        """
        if self.most_positions is not None:  # drafts behind a row's end may lie behind the last one
            position_ids = position_ids.clamp(max=self.most_positions - 1)
        verifies = logits_to_keep is None and self.one_token_arithmetic
        apart = self.one_token_arithmetic.active() if verifies else nullcontext()
        with apart:
            output: Any = self.model(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=attention_mask,
                use_cache=True,
                logits_to_keep=0 if logits_to_keep is None else logits_to_keep,
                return_dict=True,
                **{self.cache_argument: cache},
            )
            logits = output.logits
            if logits_to_keep is not None and logits.shape[1] > len(logits_to_keep):  # not asked for by Qwen2-Audio
                logits = logits[:, logits_to_keep.to(logits.device)]
            return TargetOutput(logits=logits, aux=self.take_aux() if self.taps.are_open else None)

    @contextmanager
    def masked_attention(self) -> Iterator[None]:
        """While open in any thread, the target's attention takes additive masks: flash and flex make way for SDPA.

        Of SDPA's kernels cuDNN's makes way, too (`leave_cudnn_out`), and keys are not copied (`grouped_attention`).
        """
        if self.head_device.type == "cuda":
            is_right_on(self.head_device)  # it waits for the device, which no capture may
        by_sdpa = CHANGES.held(("attention", id(self.model)), self._attend_by_sdpa)
        with CHANGES.held("cudnn", leave_cudnn_out), by_sdpa, attending_grouped(self.model):
            yield

    def _attend_by_sdpa(self) -> Callable[[], None]:
        """Unless it attends by code that takes our masks as it is. Returns what undoes it."""
        own = self.attention
        if own in ("eager", "sdpa"):
            return lambda: None
        self.model.set_attn_implementation("sdpa")
        return partial(self.model.set_attn_implementation, own)

    @property
    def none_is_causal(self) -> bool:
        """Whether the target's attention takes no mask for a causal one; see `SpeculativeCache.attention_mask`."""
        return self.attention == "sdpa"

    @property
    def attention(self) -> str:
        """Name of the target's attention; while `masked_attention` is open, of what the mask is made for."""
        name = self.model.config._attn_implementation
        return "sdpa" if name == GROUPED else name

    @property
    def bounds_prompts(self) -> bool:
        """Whether a Mamba-2 layer bounds the time steps of prompts and not those of what is written: a prompt that
        holds an answer then leaves other states than the text that has written it."""
        limits = (getattr(module, "time_step_limit", None) for module in self.model.modules())
        return any(limit is not None and tuple(limit) != (0.0, math.inf) for limit in limits)

    @property
    def input_device(self) -> torch.device:
        """Where token ids go in."""
        return _module_device(self.embedding)

    @property
    def head_device(self) -> torch.device:
        """Where logits appear, and where the drafter lives by default."""
        return _module_device(self.lm_head)

    def close(self) -> None:
        """Remove the hooks. The target is as it was before."""
        self._undo()
        self.mixers = self.draft_head = None


class Verification:
    """Verification forwards over one cache: all nodes in one stock forward, told apart by mask and positions.

    Args:
        binding: of the target.
        cache: holds what the trees follow; nothing is committed.
    """

    def __init__(self, binding: TargetBinding, cache: SpeculativeCache):
        self.binding, self.cache = binding, cache

    def __call__(self, tree: DraftTree) -> TargetOutput:
        """Logits `(B, N, V)` and, while the binding captures them, hidden states `(B, N, A*Ht)` of every node."""
        assert tree.is_chain or not self.cache.has_states, "layers with states read chains"
        self.cache.place(tree.size, is_draft=True)
        positions = self.cache.position_ids(tree.depths)
        return self.binding.forward(tree.tokens, positions, self.mask(tree), self.cache)

    def mask(self, tree: DraftTree) -> Tensor | dict[str, Tensor | None] | None:
        """Which nodes see which: what the target takes as `attention_mask` for the placed tree."""
        ancestors, depths = (None, None) if tree.is_chain else (tree.ancestors, tree.depths)
        return self.cache.attention_mask(ancestors, depths, self.binding.compute_dtype)


def _decoder_only(target: Any) -> PreTrainedModel:
    base = getattr(target, "get_base_model", None)  # PEFT
    model = base() if callable(base) else target
    if not isinstance(model, PreTrainedModel):
        raise IncompatibleTargetError(
            f"the target is a {type(target).__name__}; wanted a transformers model, e.g. from AutoModelForCausalLM."
            "from_pretrained(...), or model._orig_mod of one that torch.compile wrapped (graphs: `eagle31 warmup`)"
        )
    if model.config.is_encoder_decoder:
        raise IncompatibleTargetError(
            f"{type(model).__name__} is an encoder-decoder model; EAGLE drafts for decoder-only ones (Llama, Qwen, ...)"
        )
    return model


def _decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise IncompatibleTargetError(
        f"no list of {count} decoder layers was found in {type(decoder).__name__}; its hidden states cannot be read"
    )


def _module_device(module: nn.Module) -> torch.device:
    hook_device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if hook_device is not None:
        return torch.device(hook_device)
    weight = getattr(module, "weight", None)  # at once where there is one: this is asked in every round
    return weight.device if isinstance(weight, Tensor) else next(module.parameters()).device
