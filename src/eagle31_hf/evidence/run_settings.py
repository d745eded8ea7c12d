"""What `eagle31 bench run` is told: how to write, and which methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import ConfigurationError
from .calls import PLAIN
from .methods import LoopSettings

PURE = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
"""Temperature alone: a target's generation config may ask for more, which figures of others leave out."""


@dataclass(frozen=True)
class RunSettings:
    """What to measure.

    Attributes:
        new_tokens: most tokens of an answer.
        temperatures: 0 is greedy.
        batch_sizes: rows written together; transformers' assisted modes run with one row only.
        repeats: passes over all prompts.
        seed: the first repeat's; each call's follows from it.
        methods: names of those to run; empty: all there are.
        depth, tree_width, tree_size, compiled: as in `LoopSettings`.
        ignore_eos: write exactly `new_tokens` tokens.
        as_configured: sample as the target's generation config says, too; else by the temperature alone.
        ceilings: time the bare forwards of a round beside every text of our own loop.
    """

    new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0,)
    batch_sizes: tuple[int, ...] = (1,)
    repeats: int = 3
    seed: int = 0
    methods: tuple[str, ...] = ()
    depth: int | None = None
    tree_width: int = 4
    tree_size: int = 24
    compiled: bool = False
    ignore_eos: bool = False
    as_configured: bool = False
    ceilings: bool = False

    def check(self) -> None:
        """Raise a `ConfigurationError` naming the first field that makes no sense."""
        for temperature in self.temperatures:
            self.at(temperature).check()
        if not self.temperatures:
            raise ConfigurationError("got no temperature; wanted at least one, 0 for greedy")
        if self.methods and PLAIN not in self.methods:
            raise ConfigurationError(f"the methods lack {PLAIN!r}, which all others are compared with; add it")

    def at(self, temperature: float) -> LoopSettings:
        return LoopSettings(
            new_tokens=self.new_tokens,
            temperature=temperature,
            batch_sizes=self.batch_sizes,
            repeats=self.repeats,
            depth=self.depth,
            tree_width=self.tree_width,
            tree_size=self.tree_size,
            compiled=self.compiled,
            warping={} if self.as_configured else PURE if temperature > 0 else {"repetition_penalty": 1.0},
        )


def settings_facts(settings: RunSettings) -> Mapping[str, Any]:
    """Settings as the first line of a record file has them."""
    facts = asdict(settings)
    warping = "as configured" if settings.as_configured else "temperature alone"
    return {**facts, "warping": warping, "methods": list(settings.methods) or "all"}
