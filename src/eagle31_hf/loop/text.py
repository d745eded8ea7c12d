"""The text being written: prompts, new tokens, where each row must stop, and what `generate` returns at the end.

A block of accepted tokens is checked token by token, so the text ends where token-by-token generation would have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.generation import stopping_criteria as stock

from ..drafting.host_numbers import on_device
from ..errors import blame_caller
from ..sampling.callers_code import CallersCode


@dataclass
class StopRules:
    """A prepared `StoppingCriteriaList`, sorted by what it costs to ask.

    Attributes:
        max_length: rows never grow longer (prompt and left padding included).
        eos_ids: ids after which a row ends; empty if there are none.
        clocks: time limits, asked once per round.
        others: stop strings and custom criteria, asked after every token, as `generate` does.
        of_the_caller: those of them that transformers does not ship, or not to end texts.
    """

    max_length: int
    eos_ids: frozenset[int] = frozenset()
    clocks: list[stock.MaxTimeCriteria] = field(default_factory=list)
    others: list[stock.StoppingCriteria] = field(default_factory=list)

    @classmethod
    def from_criteria(cls, criteria: stock.StoppingCriteriaList, max_length: int) -> StopRules:
        rules = cls(max_length=max_length)
        for rule in criteria:
            if type(rule) is stock.MaxLengthCriteria:
                rules.max_length = min(rules.max_length, rule.max_length)
            elif type(rule) is stock.EosTokenCriteria:
                rules.eos_ids = rules.eos_ids | frozenset(rule.eos_token_id.tolist())
            elif type(rule) is stock.MaxTimeCriteria:
                rules.clocks.append(rule)
            else:
                rules.others.append(rule)
        return rules

    @property
    def of_the_caller(self) -> list[stock.StoppingCriteria]:
        return [rule for rule in self.others if type(rule) is not stock.StopStringCriteria]

    @property
    def names(self) -> list[str]:
        """What those are called."""
        return [getattr(rule, "__name__", type(rule).__name__) for rule in self.of_the_caller]


class Sequences:
    """Prompts and new tokens of a batch; rows grow at their own pace.

    Args:
        prompts: `(B, L)` as `generate` got them, left-padded.
        padding: pads in front of each row.
        rules: when to stop.
        pad_id: what finished rows are filled with.
        code: asks criteria of the caller's; `None`: they are asked as they are.
    """

    def __init__(
        self,
        prompts: Tensor,
        padding: Sequence[int],
        rules: StopRules,
        pad_id: int | None,
        code: CallersCode | None = None,
    ):
        self._code = code
        self.prompts = prompts
        self.padding = list(padding)
        self.rules = rules
        self.pad_id = pad_id
        self.new: list[list[int]] = [[] for _ in range(prompts.shape[0])]
        self.stopped_at: list[int | None] = [None] * prompts.shape[0]
        self.scores: list[list[Tensor]] = [[] for _ in range(prompts.shape[0])]
        self.logits: list[list[Tensor]] = [[] for _ in range(prompts.shape[0])]

    @property
    def batch_size(self) -> int:
        return self.prompts.shape[0]

    @property
    def device(self) -> torch.device:
        return self.prompts.device

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.rules.eos_ids

    def last_token(self, row: int) -> int:
        """A row's latest new token."""
        return self.new[row][-1]

    def length(self, row: int) -> int:
        """Tokens of a row as `generate` counts them, left padding included."""
        return self.prompts.shape[1] + len(self.new[row])

    def remaining_tokens(self, row: int) -> int:
        """Tokens a row may still get."""
        return self.rules.max_length - self.length(row)

    def ends_with(self, row: int, token: int, *, after: int) -> bool:
        """Whether `token`, with `after` accepted ones between it and the text, is a row's last for all that is known.

        Stop strings and the user's own criteria are not asked: they may keep count.
        """
        return token in self.rules.eos_ids or self.remaining_tokens(row) <= after + 1

    def prefix(self, row: int, drafted: Sequence[int] | Tensor = ()) -> Tensor:
        """Ids `(1, t)` of a row with its left padding, new tokens and some `drafted` ones."""
        device = self.prompts.device
        new = on_device(self.new[row], device).to(self.prompts.dtype)
        drafted = torch.as_tensor(drafted, dtype=self.prompts.dtype, device=device)
        return torch.cat((self.prompts[row], new, drafted))[None]

    def text(self, row: int, skip: int = 0) -> list[int]:
        """Ids of a row without its padding and the `skip` tokens after it."""
        return self.prompts[row, self.padding[row] + skip :].tolist() + self.new[row]

    def identity(self, row: int) -> int:
        """Which text this is: its row."""
        return row

    def snapshot(self) -> tuple[list[int], list[int | None]]:
        """New tokens of each row and where it has stopped, to be able to take back what is written from here on."""
        return [len(new) for new in self.new], list(self.stopped_at)

    def restore(self, snapshot: tuple[list[int], list[int | None]]) -> None:
        """Take back what was written since `snapshot`, scores included."""
        lengths, stopped_at = snapshot
        for row, length in enumerate(lengths):
            self._cut(row, length)
        self.stopped_at = list(stopped_at)

    def _cut(self, row: int, length: int) -> None:
        for written in (self.new, self.scores, self.logits):
            del written[row][length:]

    def append(self, row: int, tokens: Sequence[int]) -> int:
        """Add accepted tokens up to where the row must stop, or may go on otherwise. Returns how many were added."""
        added = 0
        for token in tokens:
            if self.remaining_tokens(row) <= 0:
                break
            self.new[row].append(token)
            added += 1
            if self.stopped_at[row] is None and self._must_stop(row, token):
                self.stopped_at[row] = len(self.new[row])
            if self.stopped_at[row] is not None and self._ends_alone:
                break
            if self._code is not None and self._code.has_cut(self.length(row)):
                self._cut(row, len(self.new[row]))
                break
        return added

    def _must_stop(self, row: int, token: int) -> bool:
        asked = bool(self.rules.others) and self._others_say(row)  # also where it ends anyhow: some keep count
        return asked or token in self.rules.eos_ids or self.remaining_tokens(row) <= 0

    def _others_say(self, row: int) -> bool:
        prefix = self.prefix(row)
        scores = tuple(step[None] for step in self.scores[row][: len(self.new[row])]) or None

        def ask() -> bool:
            # Every rule is asked, as `generate` does. A plain bool is an answer, too.
            return any([bool(torch.as_tensor(rule(prefix, scores)).any()) for rule in self.rules.others])  # type: ignore[arg-type]

        try:
            return ask() if self._code is None else self._code.must_end(prefix.shape[1], self.rules.names, ask)
        except Exception as error:
            blame_caller(error)
            raise

    @property
    def _ends_alone(self) -> bool:
        """Whether a finished row is padded while others go on; without EOS, `generate` lets it write on."""
        return bool(self.rules.eos_ids) or self.batch_size == 1

    def live_rows(self) -> list[int]:
        """Rows that still need tokens."""
        if self._ends_alone:
            return [row for row, stop in enumerate(self.stopped_at) if stop is None]
        if any(stop is None for stop in self.stopped_at):
            return [row for row in range(self.batch_size) if self.remaining_tokens(row) > 0]
        output_length = self.output_length
        return [row for row, new in enumerate(self.new) if len(new) < output_length]

    @property
    def output_length(self) -> int:
        """New tokens of the row that ends last: as many as `generate` returns."""
        return max(stop or len(new) for stop, new in zip(self.stopped_at, self.new, strict=True))

    def stop_if_out_of_time(self) -> None:
        """Finish every row if a time limit has passed."""
        if any(bool(clock(self.prompts, None).any()) for clock in self.rules.clocks):  # type: ignore[arg-type]
            for row, stop in enumerate(self.stopped_at):
                self.stopped_at[row] = len(self.new[row]) if stop is None else stop

    def assemble(self) -> Tensor:
        """`(B, L + n)` as `generate` returns it: rows cut where the last one ends, finished ones padded."""
        horizon = self.output_length
        pad = self.pad_id if self.pad_id is not None else 0
        rows = [new[:horizon] + [pad] * (horizon - len(new)) for new in self.new]
        new = torch.tensor(rows, dtype=self.prompts.dtype, device=self.prompts.device).view(self.batch_size, horizon)
        return torch.cat((self.prompts, new), dim=1)

    def stack_scores(self, per_row: list[list[Tensor]]) -> tuple[Tensor, ...]:
        """Per step `(B, V)`; rows that had ended get zeros there, also for drafts accepted behind their end."""
        blank = torch.zeros_like(next(row for row in per_row if row)[0])
        written = [row[: len(new)] for row, new in zip(per_row, self.new, strict=True)]
        return tuple(
            torch.stack([row[step] if step < len(row) else blank for row in written])
            for step in range(self.output_length)
        )
