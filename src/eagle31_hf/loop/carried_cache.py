"""A cache carried over from the last turn: what of it holds for this prompt, and what is left for the next. Of one row:
a batch that carries one is decoded plainly.

Plain `generate` believes that a cache it is handed belongs to the prompt; an edited history goes unnoticed and the text
is wrong. Here a cache remembers its text (`cache.eagle31_state`), and is believed only as far as that text and the
prompt agree. The drafter's own keys and values travel in the same place.

A turn resumes where record and prompt part. Tokens of unknown origin (a plain `generate` wrote them, or there is no
record at all) are read again by target and drafter. Where plain decoding takes over and is given the whole prompt, a
cache of another text is emptied (`forget_other_text`).

A drafter that has read less starts midway. It needs no position offset: its rotary positions count only as differences.
It sees less context, so fewer of its drafts may be accepted; the text is the target's either way. Reading the history
again for the drafter's sake alone would cost the very prefill that the cache saves.

The user's cache is refilled when the turn has ended: an interrupted turn leaves it as it was.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from ..cache.speculative import SpeculativeCache
from ..cache.stock import LayerStates, held_length, read_stock_layers, refill_stock_layers
from ..drafter.assistant import Assistant
from ..drafter.packed_linear import packed_tensors
from ..drafter.session import DraftSession

CHECKSUM_VALUES = 4


@dataclass(frozen=True)
class Eagle31CacheState:
    """What a `DynamicCache` remembers as `cache.eagle31_state`. Plain tensors: it can be copied and pickled.

    Attributes:
        token_ids: `(1, L)` on the CPU, the text so far. The cache holds all but its last token.
        key_checksum: `(1, k, n)` on the CPU, some numbers of the last layer's newest keys, or of its state. A deep key
            depends on every token before it, so an equal one proves that the cache still holds this text.
        drafter_cache: the drafter's keys and values of the newest positions before the last token.
        fingerprint: of the weights of target and drafter, which computed them.
    """

    token_ids: Tensor
    key_checksum: Tensor
    drafter_cache: DynamicCache
    fingerprint: str

    @property
    def length(self) -> int:
        """Tokens the cache held when this was written."""
        return self.token_ids.shape[1] - 1

    def agreement(self, prompts: Tensor) -> int:
        """How many first tokens are the same here and in `prompts` `(1, P)`."""
        width = min(self.token_ids.shape[1], prompts.shape[1])
        same = self.token_ids[0, :width] == prompts[0, :width].cpu()
        return int(same.long().cumprod(0).sum())

    def vouches_for(self, cache: DynamicCache, length: int) -> bool:
        """Whether the first `length` tokens of `cache` are still the ones recorded."""
        found, end = _checksum(cache), held_length(cache)
        here, there = length - 1 - (end - found.shape[1]), length - 1 - (self.length - self.key_checksum.shape[1])
        if not (0 <= here < found.shape[1] and 0 <= there < self.key_checksum.shape[1]):
            return False
        return torch.equal(found[:, here], self.key_checksum[:, there])


def forget_other_text(cache: DynamicCache, prompts: Tensor, config: PreTrainedConfig) -> None:
    """Empty a cache that remembers a text with which `prompts` `(1, P)` do not begin, for a loop that would believe so.

    One that does hold their beginning stays: a picture in it may be seen nowhere else.
    """
    state = getattr(cache, "eagle31_state", None)
    if isinstance(state, Eagle31CacheState) and state.agreement(prompts) < state.length:
        cache.layers = DynamicCache(config=config).layers
        cache.eagle31_state = None  # type: ignore[attr-defined]


def _checksum(cache: DynamicCache) -> Tensor:
    """`(1, k, n)`: a few numbers of each key that the last layer with keys holds; without any, of its last state."""
    written = list(read_stock_layers(cache).values())
    keys = [layer.keys for layer in written if layer.keys is not None]
    if keys:
        return keys[-1][:, 0, :, :CHECKSUM_VALUES].cpu().clone()
    *_, state = written[-1].states.values()
    return state.flatten(1)[:, None, :CHECKSUM_VALUES].cpu().clone()


# --- where a turn begins ----------------------------------------------------------------------------------------------


class CarriedCache:
    """One turn's view of a carried cache.

    Args:
        drafter: attached to the target that generates.
        cache: as `generate` hands it over, empty or not; refilled by `close`.

    Attributes:
        skip: first tokens of the prompt that need not be read: target and drafter begin with what the cache holds.
    """

    def __init__(self, drafter: Assistant, cache: DynamicCache):
        binding = drafter.binding
        self.cache = cache
        self.config: PreTrainedConfig = binding.text_config
        self.bounds_prompts = binding.bounds_prompts
        self.fingerprint = fingerprint(binding.model) + fingerprint(drafter)
        self.skip = 0
        self._last: Eagle31CacheState | None = None  # of the turn before, while it holds

    def open(self, prompts: Tensor) -> None:
        """Decide what of the cache holds for a whole text `(1, P)` without padding.

        Raises:
            UnsupportedGenerationError: the cache has another number of rows.
        """
        length = held_length(self.cache)
        held = read_stock_layers(self.cache, len(prompts)).values()
        state = getattr(self.cache, "eagle31_state", None)
        if not isinstance(state, Eagle31CacheState) or state.fingerprint != self.fingerprint:
            return
        # One token short of the agreement: the drafter joined its last position with the token after it. The prompt's
        # last token is read in any case, its logits are not kept.
        resumed = min(length, state.agreement(prompts) - 1, prompts.shape[1] - 1)
        if any(layer.states for layer in held) and (resumed < length or self.bounds_prompts):
            return  # states are those after the last token, and of an answer that was written
        # A window that has slid no longer holds what an earlier point would need.
        is_reachable = resumed == length or all(layer.num_tokens in (None, length) for layer in held)
        if resumed > 0 and is_reachable and state.vouches_for(self.cache, resumed):
            self.skip, self._last = resumed, state

    def load(self, cache: SpeculativeCache, session: DraftSession | None) -> None:
        """Begin with what holds, as copies: the user's cache is not written to."""
        if self._last is None:
            return
        cache.load_dynamic(self.cache, length=self.skip)
        of_drafter = self._last.drafter_cache
        kept = of_drafter.get_seq_length() - (self._last.length - self.skip)  # the others do not hold any more
        if session is not None and kept > 0:
            session.cache.load_dynamic(of_drafter, length=kept)

    # --- where it ends -----------------------------------------------------------------------------------------------

    def close(
        self, sequences: Tensor, target: SpeculativeCache, drafter: SpeculativeCache | None
    ) -> DynamicCache | None:
        """Refill the cache with all but the last token of the text, as plain `generate` leaves it.

        Args:
            sequences: `(1, T)` as `generate` returns them.
            target, drafter: the caches the text was written with.

        Returns:
            The cache, or `None` if no stock cache can hold the text. It is then as it was.
        """
        length = sequences.shape[1] - 1
        held, empty = target.held_row(0), DynamicCache(config=self.config)
        if target.lengths[0] != length or not _fits(empty, held, length):
            return None
        state_of_drafter = _cache_of_drafter(drafter)
        self.cache.layers = empty.layers  # lets the old contents go first: two copies of the history, never three
        self.cache.eagle31_state = None  # type: ignore[attr-defined]
        try:
            refill_stock_layers(self.cache, held, length)
        except BaseException:
            self.cache.layers = DynamicCache(config=self.config).layers  # empty, never half filled
            raise
        self.cache.eagle31_state = Eagle31CacheState(  # type: ignore[attr-defined]
            token_ids=sequences.to("cpu", copy=True),  # the caller may change what is returned
            key_checksum=_checksum(self.cache),
            drafter_cache=state_of_drafter,
            fingerprint=self.fingerprint,
        )
        return self.cache


def _cache_of_drafter(drafter: SpeculativeCache | None) -> DynamicCache:
    """What a drafter's cache holds, in memory of its own; nothing where its window has slid: the next turn counts its
    positions from what it is given."""
    held: LayerStates = {} if drafter is None else drafter.held_row(0)
    found, lengths = DynamicCache(), {layer.num_tokens for layer in held.values()}
    if drafter is not None and lengths == {drafter.lengths[0]}:
        refill_stock_layers(found, held, drafter.lengths[0])
    return found


# --- stock caches -----------------------------------------------------------------------------------------------------


def _fits(empty: DynamicCache, held: LayerStates, length: int) -> bool:
    """Whether the layers that hold only a window are those that slide in a stock cache, too."""
    return all(
        layer.num_tokens in (None, length) or isinstance(empty.layers[index], DynamicSlidingWindowLayer)
        for index, layer in held.items()
    )


def fingerprint(network: nn.Module) -> str:
    """Changes with the network's class, its weights' names, shapes and packing, and with training."""
    digest = hashlib.sha256(type(network).__name__.encode())
    samples: dict[torch.device, list[Tensor]] = {}
    for name, weight in (*network.named_parameters(), *packed_tensors(network).items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        # A target's packed weights are subclasses that need not support indexing; offloaded ones are not here.
        if type(weight) in (nn.Parameter, Tensor) and not weight.is_meta and weight.numel():
            few = weight.detach().flatten()[:: max(1, weight.numel() // 4)][:4]
            samples.setdefault(few.device, []).append(few.float())
    for few_of_each in samples.values():
        digest.update(torch.cat(few_of_each).cpu().numpy().tobytes())
    return digest.hexdigest()
