"""The texts of a batch as rounds see them: each chooses its tokens in its own way, and fails alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from ..compiled.graph_makers import GraphMaker
from ..decoding.choosing import ChoiceRule
from ..decoding.round import RoundBatch
from ..sampling.seen_tokens import SeenTokens
from ..stats import SpeculationStats
from ..target.binding import TargetBinding
from ..trees.host_numbers import on_device
from ..trees.shape import DraftShape
from .choosing import ScoreShape, TokenChooser
from .shared_noise import SharedNoise
from .written_text import WrittenText


def seen_in(prompts: Sequence[Sequence[int]], scores: ScoreShape) -> SeenTokens:
    """Which tokens these have, of any length each."""
    width = max(map(len, prompts))
    pads = [width - len(prompt) for prompt in prompts]
    ids = [[*[0] * pad, *prompt] for pad, prompt in zip(pads, prompts, strict=True)]
    return SeenTokens(on_device(ids, scores.device), scores.vocabulary, pads)


class BatchTexts:
    """What `decoding.round.Texts` and `decoding.choosing.Choosing` ask, of texts that come and go.

    Args:
        binding: of the target.
        shape: the largest draft of a round.
        stats: told where drafts are made without a text's grammar.
        graph_maker: as in `Choosing`.

    Attributes:
        texts: by place.
    """

    wants_scores = False
    eos_ids: frozenset[int] = frozenset()  # where texts end is their writers' affair: drafts go on

    def __init__(
        self, binding: TargetBinding, shape: DraftShape, stats: SpeculationStats, graph_maker: GraphMaker | None
    ):  # fmt: skip
        self.texts: list[WrittenText] = []
        self.shape, self.stats, self.graph_maker = shape, stats, graph_maker
        self.device = binding.input_device
        self._seen: tuple[list[WrittenText], SeenTokens] | None = None  # of these texts
        self._scores = ScoreShape(binding.text_config.vocab_size, binding.head_device)
        self._noise = SharedNoise(*self._scores)

    # --- what was written ------------------------------------------------------------------------------------------

    @property
    def new(self) -> list[list[int]]:
        return [text.writer.tokens for text in self.texts]

    def last_token(self, row: int) -> int:
        return self.texts[row].last_token

    def remaining_tokens(self, row: int) -> int:
        return self.texts[row].writer.remaining

    def text(self, row: int) -> list[int]:
        """Prompt and new tokens."""
        return self.texts[row].tokens

    def identity(self, row: int) -> WrittenText:
        """Which text this is; its place may become another's."""
        return self.texts[row]

    def prefix(self, row: int, drafted: Tensor) -> Tensor:
        return torch.cat((on_device(self.texts[row].tokens, self.device), drafted.to(self.device)))[None]

    # --- how tokens are chosen -------------------------------------------------------------------------------------

    @property
    def _choosers(self) -> list[TokenChooser]:
        return [text.chooser for text in self.texts]

    def choice_rules(self, batch: RoundBatch) -> list[ChoiceRule]:
        """One for the rows of each kind, and for each row whose prefixes have to be looked at."""
        alike: dict[Hashable, list[int]] = {}
        for place, chooser in enumerate(self._choosers):
            alike.setdefault(place if chooser.kind is None else chooser.kind, []).append(place)
        rows = [0] * len(self.texts)  # each text's processors know of one row
        firsts = [(places, self.texts[places[0]].chooser) for places in alike.values()]
        return [ChoiceRule(places, one.processing, one.draws, rows, fails_alone=True) for places, one in firsts]

    def noise_for(self, batch: RoundBatch, count: int, *, behind: int = 0) -> Tensor | None:
        """Of greedy rows beside drawn ones it is 1, which changes no choice."""
        if not any(chooser.draws for chooser in self._choosers):
            return None
        starts = [written - behind for written in batch.written]
        unseeded = [place for place, chooser in enumerate(self._choosers) if chooser.draws and chooser.seed is None]
        shared = self._noise.window([self.texts[p] for p in unseeded], [starts[p] for p in unseeded], count)
        if len(unseeded) == len(self.texts):
            return shared
        noise = dict(zip(unseeded, shared, strict=True))
        greedy = torch.ones((), device=self._scores.device).expand(count, self._scores.vocabulary)
        for place, chooser in enumerate(self._choosers):
            if place not in noise:
                noise[place] = chooser.noise(starts[place], count, self._scores) if chooser.draws else greedy
        return noise[0][None] if len(noise) == 1 else torch.stack([noise[place] for place in range(len(noise))])

    def seen_before(self, batch: RoundBatch) -> Tensor | None:
        if not any(chooser.needs_seen for chooser in self._choosers):
            return None
        if self._seen is None or self._seen[0] != self.texts:
            prompts = [text.request.prompt for text in self.texts]
            self._seen = list(self.texts), seen_in(prompts, self._scores)
        return self._seen[1].of(range(len(self.texts)), self.new)
