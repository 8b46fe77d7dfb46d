"""How many tokens to draft: as many as pay by what was measured in this call, none where drafting loses."""

from __future__ import annotations

import statistics
from collections import deque

SCHEDULES = ("measured", "constant")

# evidence is forgotten so that a change of topic shows: weight of an examined token, per token examined after it
_MEMORY = 0.97
# where nothing was examined yet: a guess, worth this many tokens
_PRIOR, _PRIOR_WEIGHT = 0.7, 2.0
# what is believed of acceptance at a probe, as if from this many tokens: a few accepted ones change it
_PROBE_WEIGHT = 3.0
# tokens without drafting after it was found to lose; doubled each time
_FIRST_PAUSE = 16
# tokens drafted to find out: at the very first, where the assistant reads the prompt; to learn what a draft costs; and
# after a pause
_FIRST, _SECOND, _PROBE = 1, 2, 4


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens of one verification: ``(1 - a^(g+1)) / (1 - a)``, if each draft is accepted with probability ``a``.

    Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", 2023.
    """
    if acceptance >= 1:
        return length + 1.0
    return (1 - acceptance ** (length + 1)) / (1 - acceptance)


class _Times:
    """The median of the newest times of one thing."""

    def __init__(self) -> None:
        self._held: deque[float] = deque(maxlen=9)

    def add(self, seconds: float) -> None:
        self._held.append(seconds)

    @property
    def median(self) -> float | None:
        return statistics.median(self._held) if self._held else None


class DraftLength:
    """Chooses the draft length of each round of one call.

    With ``a`` the acceptance, ``v(g)`` the time to verify ``g`` drafts and ``d`` that of one draft, drafting ``g``
    tokens gives ``expected_tokens(a, g) / (v(g) + g d)`` tokens a second, and none gives ``1 / v(0)``. The best is
    taken. Where none is best, drafting stops for some tokens, then tries again; the pause doubles. Where drafting would
    lose even if all were accepted, there is nothing to try.

    All is measured in this call; the next starts afresh.

    Parameters
    ----------
    most
        The longest draft.
    schedule
        ``"measured"``, or ``"constant"``: always ``most``.
    """

    def __init__(self, most: int, schedule: str) -> None:
        self._most = most
        self._constant = schedule == "constant"
        self._verify: dict[int, _Times] = {}
        self._draft = _Times()
        self._accepted, self._examined = _PRIOR * _PRIOR_WEIGHT, _PRIOR_WEIGHT
        # the next draft is to find out, whatever is believed
        self._probing = True
        self._waiting, self._pause = 0, _FIRST_PAUSE
        self._rounds: list[tuple[int, float]] = []
        self.switched_off = 0

    @property
    def acceptance(self) -> float:
        """The probability that a draft is accepted, as far as is known."""
        return self._accepted / self._examined

    def choose(self) -> int:
        """Tokens to draft now."""
        if self._constant:
            return self._most
        # the first round measures what a forward without a draft costs
        if not self._verify or self._waiting > 0:
            return 0
        if self._probing or self._draft.median is None:
            return min(self._most, _PROBE if self._draft.median is not None else _SECOND if self._rounds else _FIRST)
        best = self._best(self.acceptance)
        if best == 0:
            self.switched_off += 1
            self._wait()
        return best

    def record(self, width: int, drafted: int, progress: int, draft_seconds: float, verify_seconds: float) -> None:
        """Learn from a round.

        Parameters
        ----------
        width
            Columns that were verified.
        drafted
            Tokens drafted for the rows that are furthest behind; 0 where there were none.
        progress
            Columns by which all rows got ahead.
        """
        self._verify.setdefault(width, _Times()).add(verify_seconds)
        if self._waiting > 0:
            self._waiting -= progress
            if self._waiting <= 0:
                self._resume()
        if drafted == 0:
            return
        if not self._probing:
            # a draft after a pause takes longer: the assistant reads what it has missed
            self._draft.add(draft_seconds / drafted)
        kept = min(progress - 1, drafted)
        examined = min(kept + 1, drafted)
        fade = _MEMORY**examined
        self._accepted = self._accepted * fade + kept
        self._examined = self._examined * fade + examined
        self._rounds.append((drafted, draft_seconds + verify_seconds))
        if self._probing:
            self._probing = False
            if self._best(self.acceptance) > 0:
                self._pause = _FIRST_PAUSE

    def _wait(self) -> None:
        self._waiting = self._pause
        self._pause *= 2

    def _resume(self) -> None:
        if self._best(1.0) == 0:
            self._wait()
            return
        weight = min(self._examined, _PROBE_WEIGHT)
        self._accepted, self._examined = self.acceptance * weight, weight
        self._probing = True

    def _best(self, acceptance: float) -> int:
        speeds = [self._speed(acceptance, length) for length in range(self._most + 1)]
        return max(range(self._most + 1), key=speeds.__getitem__)

    def _speed(self, acceptance: float, length: int) -> float:
        draft = self._draft.median or 0.0
        return expected_tokens(acceptance, length) / (self._verify_seconds(length) + length * draft)

    def _verify_seconds(self, length: int) -> float:
        """The time of a forward that verifies so many drafts; between and beyond what was measured, on a line."""
        known = {width - 1: times.median or 0.0 for width, times in self._verify.items()}
        below = max((point for point in known if point <= length), default=min(known))
        above = min((point for point in known if point > length), default=None)
        if below == length or len(known) == 1:
            return known[below]
        first, last = (min(known), below) if above is None else (below, above)
        # a longer forward takes no less: noise must not say so
        slope = max(0.0, (known[last] - known[first]) / (last - first)) if last > first else 0.0
        return known[below] + slope * (length - below)

    @property
    def plain_step(self) -> float | None:
        """The median time of a forward without a draft."""
        times = self._verify.get(1)
        return None if times is None else times.median

    def predicted(self, acceptance: float | None) -> float | None:
        """The speed-up that the formula gives for the drafts of this call, over the rounds that had one."""
        if self.plain_step is None or acceptance is None or not self._rounds:
            return None
        tokens = sum(expected_tokens(acceptance, length) for length, _ in self._rounds)
        return tokens * self.plain_step / sum(seconds for _, seconds in self._rounds)
