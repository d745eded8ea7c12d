"""How a drafter drafts at run time, where Hugging Face users look for it: `eagle.generation_config`."""

from __future__ import annotations

import difflib
import logging
from functools import cache
from typing import Any

from transformers import GenerationConfig

from .drafting.shape import FIXED_DEPTH, LONGEST_CHAIN, USUAL_TREE, DraftShape
from .errors import ConfigurationError, removal

logger = logging.getLogger(__name__)

MIN_CONFIDENCE = 0.02
ACCELERATIONS = ("auto", "eager", "compile")
LOOPS = ("auto", "own", "plain")
CACHE_TYPES = ("auto", "full", "int8")
SCHEDULES = ("planned", "constant", "pid")


class Eagle31GenerationConfig(GenerationConfig):
    """`GenerationConfig` with the few fields of our own. A field that neither knows is refused by name.

    Args:
        num_assistant_tokens: draft depth, tokens drafted one after the other in a round. `None` (default) decides by
            `draft_shape`: where asking the device costs nothing (CPU, one row, chain) up to 12 tokens, ended early
            by the drafter's own doubt; by graphs 7 (for sampled text 5, as a tree), captured ones as many as pay by
            the bytes of weights that a step and the target read; elsewhere 6.
        draft_min_confidence: end a chain once the product of the drafter's largest probabilities, step by step, falls
            below this (for a greedy chain, its probability). `None` (default): 0.02 where `num_assistant_tokens` is
            `None` and asking costs nothing, else never.
        num_assistant_tokens_schedule: how the draft length follows what is accepted (docs/speed.md). `"planned"`
            (default) takes the length that is expected to write fastest, up to `num_assistant_tokens`, rests where
            drafts do not pay, and drafts from the text itself where it repeats; `"pid"` does the same with a length
            that a controller steers, from `num_assistant_tokens` up to 12; `"constant"` keeps one length, and rests
            after eight rounds in vain. Our own loop only.
        draft_top_k: children per tree node; 1 drafts a chain. A tree keeps the nodes the drafter is surest of
            (EAGLE-2). `None` (default): 2 where `draft_tree_size` is given, and, in trees of 8 nodes, where graphs
            draft for one sampled text and nothing else is said of drafts; elsewhere 1.
        draft_tree_size: nodes verified per round, root included; `None` means `num_assistant_tokens + 1` for a chain
            and `2 * draft_top_k * num_assistant_tokens` for a tree that was asked for.
        draft_window: positions the drafter sees back, which bounds its cache whatever the text's length; `None`
            (default): as far as it was trained to (`config.sliding_window`), mostly everything. The text is the same.
        speculation_loop: `"auto"` (our loop where it is exact, else plain decoding, whose reason is logged), or
            exactly one of `"own"`, `"plain"`.
        acceleration: `"auto"` (default): captured graphs on a CUDA device; on a CPU graphs where `eagle31 warmup` has
            left them for this pair and machine, else eager code; nothing is compiled (docs/speed.md).
            `"eager"`: no graphs. `"compile"`: as `"auto"`, and a text without graphs says why; on a CUDA device
            short texts are captured, too.
        cache_type: how the target's keys and values are stored: `"full"` in its own dtype, `"int8"` in 8 bits
            (docs/memory.md); `"auto"` (default) is `"full"` unless a memory plan says otherwise. The text is
            then what the target writes over such a cache, with or without drafts. Our own loop only.
    """

    draft_top_k: int | None = None
    draft_min_confidence: float | None = None
    draft_tree_size: int | None = None
    draft_window: int | None = None
    speculation_loop: str = "auto"
    acceleration: str = "auto"
    cache_type: str = "auto"

    def __init__(self, **kwargs):
        if kwargs.pop("draft_length_bounds", None) is not None:  # saved by an earlier version, most likely as null
            raise ConfigurationError(removal("draft_length_bounds"))
        for gone in ("draft_confidence_floor", "draft_tree"):  # 0.1 saved them with drafters, which still load
            if kwargs.pop(gone, None) not in (None, "dynamic"):
                logger.warning("eagle31: ignored: %s", removal(gone))
        for name in OWN_FIELDS:
            setattr(self, name, kwargs.pop(name, getattr(Eagle31GenerationConfig, name)))
        kwargs.setdefault("num_assistant_tokens_schedule", "planned")
        super().__init__(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise a `ConfigurationError` for a value that makes no sense, or a field that nothing would read: most likely
        it is misspelt."""
        if gone := removal(name):
            raise ConfigurationError(gone)
        if not name.startswith("_") and name not in _known_fields():
            close = difflib.get_close_matches(name, _known_fields(), n=1)
            meant = f"; did you mean {close[0]}?" if close else f"; our own are {', '.join(OWN_FIELDS)}"
            raise ConfigurationError(f"eagle.generation_config has no field {name!r}{meant}")
        _check_field(name, value)
        super().__setattr__(name, value)

    @property
    def asked_top_k(self) -> int | None:
        """Children per tree node that were asked for; a tree's size alone asks for two."""
        if self.draft_top_k is None and self.draft_tree_size is not None:
            return USUAL_TREE.top_k
        return self.draft_top_k

    def draft_shape(
        self, *, device_type: str, rows: int, asked: int | None = None, by_graphs: DraftShape | None = None
    ) -> DraftShape:
        """The largest draft of a round.

        The smallest confidence was chosen on the embedded pair: its drafter doubts itself more than it errs, so a small
        one saves the steps that are almost never accepted and no others.

        Args:
            device_type: where the drafter runs; reading its confidence makes an accelerator wait.
            rows: of the batch.
            asked: depth that the `generate` call itself asks for.
            by_graphs: what graphs draft where nothing is asked for; `None`: rounds are eager.
        """
        depth, top_k, least = asked or self.num_assistant_tokens, self.asked_top_k or 1, self.draft_min_confidence
        is_steered = self.num_assistant_tokens_schedule == "pid"
        if depth is None and top_k == 1:
            if by_graphs is not None:
                may_be_tree = rows == 1 and not is_steered and self.asked_top_k is None and not least
                return by_graphs if may_be_tree else DraftShape(by_graphs.depth, least or 0.0)
            if device_type == "cpu" and rows == 1 and not is_steered:
                return DraftShape(LONGEST_CHAIN, MIN_CONFIDENCE if least is None else least)
        depth = depth or FIXED_DEPTH
        if top_k == 1:
            return DraftShape(depth, least or 0.0)
        return DraftShape(depth, top_k=top_k, size=self.draft_tree_size or 2 * top_k * depth)

    @property
    def stored_cache_type(self) -> str:
        """`cache_type` as the cache takes it."""
        return "full" if self.cache_type == "auto" else self.cache_type

    def check(self) -> None:
        """Raise a `ConfigurationError` naming fields that contradict each other; each by itself was checked when it was
        set."""
        size = self.draft_tree_size
        if size is not None and self.draft_top_k == 1:
            raise ConfigurationError(
                f"draft_tree_size is {size} and draft_top_k 1, which drafts a chain; leave draft_top_k out for a tree "
                "of that size, or draft_tree_size for a chain"
            )
        if self.stored_cache_type != "full" and self.speculation_loop == "plain":
            raise ConfigurationError(
                f"cache_type is {self.cache_type!r} and speculation_loop {self.speculation_loop!r}; only our own loop "
                "stores keys and values in 8 bits: leave speculation_loop at 'auto', or cache_type at 'full'"
            )


COUNTS = ("draft_top_k", "num_assistant_tokens", "prefill_chunk_size", "draft_window")
CHOICES: dict[str, tuple[str, ...]] = {
    "speculation_loop": LOOPS,
    "acceleration": ACCELERATIONS,
    "cache_type": CACHE_TYPES,
    "num_assistant_tokens_schedule": SCHEDULES,
}


def _check_field(name: str, value: Any) -> None:
    """Raise a `ConfigurationError` if this field cannot have this value."""
    if name in CHOICES and value not in CHOICES[name]:
        raise ConfigurationError(
            removal(f"{name} {value}") or f"{name} is {value!r}; wanted one of {', '.join(CHOICES[name])}"
        )
    if value is None:
        return
    if name in COUNTS:
        require_count(name, value)
    if name == "draft_tree_size" and (not isinstance(value, int) or value < 2):
        raise ConfigurationError(f"draft_tree_size is {value!r}; wanted at least 2 (root and one draft token)")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if name == "draft_min_confidence" and not (is_number and 0.0 <= value < 1.0):
        raise ConfigurationError(f"draft_min_confidence is {value!r}; wanted a probability below 1, or None")


def require_count(name: str, value: Any) -> None:
    """Raise a `ConfigurationError` unless the field's value is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{name} is {value!r}; wanted a whole number of at least 1")


OWN_FIELDS = tuple(Eagle31GenerationConfig.__annotations__)


@cache
def _known_fields() -> frozenset[str]:
    return frozenset(vars(GenerationConfig())) | {*OWN_FIELDS}
