"""What rounds took on one machine: plain figures, as they lie on disk. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import ConfigurationError
from ..adaptive.costs import MOST_TOKENS, RoundCosts


@dataclass(frozen=True)
class ContextSeconds:
    """Seconds of rounds behind a text of `context` tokens.

    Attributes:
        forward_s: of the target, as in `RoundCosts`, and of all else in such a round.
        drafter_step_s, absorb_s, resume_s: of the drafter, as in `RoundCosts`.
    """

    context: int
    forward_s: tuple[tuple[int, float], ...]
    drafter_step_s: float
    absorb_s: float
    resume_s: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """All that was measured of one way to compute a pair's rounds.

    Attributes:
        contexts: by length of the text, rising; at least one.
        round_s, plain_round_s: what a round takes beyond `forward_s`, with drafts and without; 0 of whole rounds.
        in_buckets: as in `RoundCosts`.

    Raises:
        ConfigurationError: figures that nothing can have measured.
    """

    contexts: tuple[ContextSeconds, ...]
    round_s: float
    plain_round_s: float
    in_buckets: bool = False

    def __post_init__(self) -> None:
        lengths = [each.context for each in self.contexts]
        if not lengths or lengths != sorted(set(lengths)) or not 0 <= lengths[0] <= lengths[-1] <= MOST_TOKENS:
            raise ConfigurationError(f"got contexts of {lengths} tokens; wanted at least one, rising")
        for each in self.contexts:
            self._costs(each)

    def costs(self, context: int) -> RoundCosts:
        """Of rounds behind a text of about `context` tokens: the nearest length that was measured."""
        return self._costs(min(self.contexts, key=lambda each: abs(each.context - context)))

    def _costs(self, each: ContextSeconds) -> RoundCosts:
        return RoundCosts(
            each.forward_s,
            drafter_step_s=each.drafter_step_s,
            absorb_s=each.absorb_s,
            round_s=self.round_s,
            plain_round_s=self.plain_round_s,
            resume_s=each.resume_s,
            in_buckets=self.in_buckets,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Calibration:
        """What `to_dict` made.

        Raises:
            ConfigurationError: it did not make this, or figures make no sense.
        """
        try:
            contexts = tuple(
                ContextSeconds(
                    context=int(each["context"]),
                    forward_s=tuple((int(width), float(seconds)) for width, seconds in each["forward_s"]),
                    drafter_step_s=float(each["drafter_step_s"]),
                    absorb_s=float(each["absorb_s"]),
                    resume_s=float(each["resume_s"]),
                )
                for each in fields["contexts"]
            )
            seconds = float(fields["round_s"]), float(fields["plain_round_s"])
            return cls(contexts, *seconds, in_buckets=bool(fields["in_buckets"]))
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ConfigurationError(
                f"got something else than a calibration ({type(error).__name__}: {error}); wanted what "
                "`eagle31 doctor --calibrate` writes"
            ) from error
