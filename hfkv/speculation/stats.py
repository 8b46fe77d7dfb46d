"""What speculation did in one call of `generate`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .control import DraftLength

ATTRIBUTE = "hfkv_stats"


@dataclass(frozen=True)
class Stats:
    """What `hfkv.stats` returns. Times are in seconds and leave out the prompt.

    Attributes
    ----------
    assistant
        The assistant's name.
    tokens
        Columns generated after the first, which the prompt's forward gives; padding of rows that ended included.
    verifications
        Forwards of the target after the prompt, those without a draft included.
    plain_steps
        Forwards without a draft: nothing was proposed, or drafting was off.
    drafted, examined, accepted
        Tokens proposed; those that were compared with the target's (up to and with the first rejected one); and those
        that were kept. Summed over rows.
    switched_off
        How often drafting was stopped because it lost.
    seconds, draft_seconds
        All decoding, and the assistant's share of it.
    plain_step_seconds
        The median time of a forward without a draft; None where there was none.
    predicted_speedup
        From the measured acceptance, costs and draft lengths by the known formula, over the rounds with a draft; None
        without a measured plain step or draft.
    """

    assistant: str
    tokens: int
    verifications: int
    plain_steps: int
    drafted: int
    examined: int
    accepted: int
    switched_off: int
    seconds: float
    draft_seconds: float
    plain_step_seconds: float | None
    predicted_speedup: float | None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of examined tokens: the probability that a draft is accepted, given that those before it were."""
        return self.accepted / self.examined if self.examined else None

    @property
    def acceptance_interval(self) -> tuple[float, float] | None:
        """The 95 % interval of `acceptance_rate` (Wilson, 1927)."""
        if not self.examined:
            return None
        z, n, rate = 1.96, self.examined, self.accepted / self.examined
        centre = rate + z * z / (2 * n)
        spread = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
        return max(0.0, (centre - spread) / (1 + z * z / n)), min(1.0, (centre + spread) / (1 + z * z / n))

    @property
    def tokens_per_verification(self) -> float:
        """Columns per forward of the target."""
        return self.tokens / self.verifications if self.verifications else 0.0

    @property
    def draft_share(self) -> float:
        """The assistant's share of the time."""
        return self.draft_seconds / self.seconds if self.seconds else 0.0

    @property
    def measured_speedup(self) -> float | None:
        """Against a forward per token at the time that one without a draft took in this call."""
        if self.plain_step_seconds is None or not self.seconds:
            return None
        return self.tokens * self.plain_step_seconds / self.seconds

    def __str__(self) -> str:
        rate, interval = self.acceptance_rate, self.acceptance_interval
        accepted = "nothing drafted"
        if rate is not None and interval is not None:
            accepted = f"{rate:.0%} accepted ({interval[0]:.0%} to {interval[1]:.0%})"
        speed = "" if self.measured_speedup is None else f", {self.measured_speedup:.2f} times plain steps"
        return (
            f"{self.assistant}: {self.tokens} tokens in {self.verifications} forwards "
            f"({self.tokens_per_verification:.2f} each), {accepted}, {self.draft_share:.0%} of the time drafting{speed}"
        )


@dataclass
class Counts:
    """What the loop counts while it decodes, and the outputs that it collects."""

    tokens: int = 0
    forwards: int = 0
    plain: int = 0
    drafted: int = 0
    examined: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def stats(self, assistant: str, length: DraftLength, seconds: float) -> Stats:
        """What `hfkv.stats` shows of it."""
        return Stats(
            assistant=assistant,
            tokens=self.tokens,
            verifications=self.forwards,
            plain_steps=self.plain,
            drafted=self.drafted,
            examined=self.examined,
            accepted=self.accepted,
            switched_off=length.switched_off,
            seconds=seconds,
            draft_seconds=self.draft_seconds,
            plain_step_seconds=length.plain_step,
            predicted_speedup=length.predicted(self.accepted / self.examined if self.examined else None),
        )


def attach(output: Any, found: Stats) -> None:
    """Let `stats` find the numbers of what `generate` returns."""
    setattr(output, ATTRIBUTE, found)


def stats(output: Any) -> Stats:
    """What speculation did in the call of `generate` that returned this.

    Parameters
    ----------
    output
        What `generate` returned, token ids or a full output; not a part or a copy of it.

    Raises
    ------
    ValueError
        No assistant took part, or this is not what `generate` returned.
    """
    found = getattr(output, ATTRIBUTE, None)
    if found is None:
        raise ValueError(
            f"there are no statistics on this {type(output).__name__}: pass what generate(**hfkv.assistant(...)) "
            "returned, as it is (a slice or a copy of it has none)"
        )
    result: Stats = found
    return result
