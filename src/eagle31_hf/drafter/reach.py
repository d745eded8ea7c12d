"""How far back a drafter sees: as it was trained to, and as its user wishes."""

from __future__ import annotations

import logging

from .drafter import Eagle31Drafter

logger = logging.getLogger(__name__)
_said: set[tuple[str | None, int]] = set()


def attention_window(drafter: Eagle31Drafter) -> int | None:
    """Positions each layer sees back, its own included; `None`: all of them."""
    windows = (drafter.config.sliding_window, drafter.generation_config.draft_window)
    return min((window for window in windows if window is not None), default=None)


def layer_windows(drafter: Eagle31Drafter) -> list[int | None]:
    """The same by layer, as caches take it."""
    return [attention_window(drafter)] * drafter.config.num_hidden_layers


def warn_of_length(drafter: Eagle31Drafter) -> None:
    """Say once that a text has become longer than the drafter was made for."""
    trained = drafter.config.max_position_embeddings
    if (drafter.name_or_path, trained) in _said:
        return
    _said.add((drafter.name_or_path, trained))
    window = attention_window(drafter)
    advice = "" if window is not None and window <= trained else (
        f"; eagle.generation_config.draft_window = {trained} lets it see no further back, and bounds its cache"
    )  # fmt: skip
    logger.warning(
        "eagle31: the text has passed the %d tokens that the drafter was made for: it stays the target's, but fewer "
        "drafts may be accepted%s",
        trained,
        advice,
    )
