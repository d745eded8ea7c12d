"""What a benchmark is told: how to write, and which methods."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import ConfigurationError
from ..generation_config import USUAL_TREE
from .calls import PLAIN

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
        depth: draft tokens one after another, of chain and tree; `None`: what the drafter does by itself.
        tree_width, tree_size: children per node of the tree, and its nodes with the root; of themselves as graphs draft
            for sampled text.
        compiled: measure the accelerated loops, too.
        ignore_eos: write exactly `new_tokens` tokens.
        as_configured: sample as the target's generation config says, too; else by the temperature alone.
        ceilings: time the bare forwards of a round beside every text of our own loop.
        acceptance: chance of each draft position where acceptance is synthetic, else `None`.
    """

    new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0,)
    batch_sizes: tuple[int, ...] = (1,)
    repeats: int = 3
    seed: int = 0
    methods: tuple[str, ...] = ()
    depth: int | None = None
    tree_width: int = USUAL_TREE.top_k
    tree_size: int = USUAL_TREE.nodes
    compiled: bool = False
    ignore_eos: bool = False
    as_configured: bool = False
    ceilings: bool = False
    acceptance: tuple[float, ...] | None = None

    def check(self) -> None:
        """Raise a `ConfigurationError` naming the first field that makes no sense."""
        depth = 1 if self.depth is None else self.depth
        counts = {"repeats": self.repeats, "batch size": min(self.batch_sizes, default=0), "depth": depth}
        for name, count in counts.items():
            if count < 1:
                raise ConfigurationError(f"{name} is {count}; wanted at least 1")
        if self.new_tokens < 3:
            raise ConfigurationError(f"new_tokens is {self.new_tokens}; speculation begins with the third token")
        if self.tree_width < 2 or self.tree_size < 3:
            raise ConfigurationError(
                f"got a tree of width {self.tree_width} and {self.tree_size} nodes; wanted a width of at least 2 and "
                "at least 3 nodes (chains are measured anyway)"
            )
        if not self.temperatures:
            raise ConfigurationError("got no temperature; wanted at least one, 0 for greedy")
        for temperature in self.temperatures:
            if not (temperature >= 0 and math.isfinite(temperature)):
                raise ConfigurationError(f"temperature is {temperature}; wanted 0 (greedy) or a positive number")
        chances = self.acceptance
        if chances is not None and not (chances and all(0 <= each <= 1 for each in chances)):  # NaN is neither
            raise ConfigurationError(
                f"got acceptance {list(chances)}; wanted one probability from 0 to 1 per draft position, e.g. 0.8,0.7"
            )
        if self.methods and PLAIN not in self.methods:
            raise ConfigurationError(f"the methods lack {PLAIN!r}, which all others are compared with; add it")

    def at(self, temperature: float) -> RunSettings:
        """The same at one temperature."""
        return replace(self, temperatures=(temperature,))

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn, where there is one temperature."""
        return self.temperatures[0] > 0

    def to_generate(self) -> dict[str, Any]:
        """Keyword arguments of `generate`, where there is one temperature."""
        sampling: dict[str, Any] = {"temperature": self.temperatures[0]} if self.samples else {}
        if not self.as_configured:
            sampling |= PURE if self.samples else {"repetition_penalty": 1.0}
        return {"max_new_tokens": self.new_tokens, "do_sample": self.samples, **sampling}

    def to_dict(self) -> dict[str, Any]:
        """As the first line of a record file has them."""
        facts = asdict(self)
        if self.acceptance is None:
            del facts["acceptance"]
        warping = "as configured" if self.as_configured else "temperature alone"
        return {**facts, "warping": warping, "methods": list(self.methods) or "all"}
