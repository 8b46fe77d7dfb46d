"""How many tokens to draft: as many as pay by what was measured in this call, none where drafting loses."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

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
_FIRST, _SECOND, _PROBE = 1, 2, 2


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens of one verification: ``(1 - a^(g+1)) / (1 - a)``, if each draft is accepted with probability ``a``.

    Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", 2023.
    """
    if acceptance >= 1:
        return length + 1.0
    return (1 - acceptance ** (length + 1)) / (1 - acceptance)


@dataclass(frozen=True)
class Grade:
    """How good a draft will be, where that shows before it is made: acceptance is learnt for each label apart.

    Attributes
    ----------
    label
        Drafts of one label are accepted about as often as each other.
    prior
        How often that is, where nothing was examined yet.
    """

    label: int
    prior: float


class _Belief:
    """What is known of the drafts of one grade."""

    def __init__(self, prior: float, probing: bool) -> None:
        self.accepted, self.examined = prior * _PRIOR_WEIGHT, _PRIOR_WEIGHT
        # the next draft is to find out, whatever is believed
        self.probing = probing
        self.waiting, self.pause = 0, _FIRST_PAUSE

    @property
    def acceptance(self) -> float:
        """The probability that a draft is accepted, as far as is known."""
        return self.accepted / self.examined

    def learn(self, examined: int, kept: int) -> None:
        """Count a draft."""
        fade = _MEMORY**examined
        self.accepted = self.accepted * fade + kept
        self.examined = self.examined * fade + examined

    def wait(self) -> None:
        """Draft nothing for some tokens, each time for twice as many."""
        self.waiting = self.pause
        self.pause *= 2

    def probe(self) -> None:
        """Find out again: a few accepted tokens change what is believed."""
        weight = min(self.examined, _PROBE_WEIGHT)
        self.accepted, self.examined = self.acceptance * weight, weight
        self.probing = True


class _Times:
    """The median of the newest times of one thing."""

    def __init__(self) -> None:
        self._held: deque[float] = deque(maxlen=9)
        # asked for more often than a time is added
        self.median: float | None = None

    def add(self, seconds: float) -> None:
        self._held.append(seconds)
        self.median = statistics.median(self._held)


class DraftLength:
    """Chooses the draft length of each round of one call.

    With ``a`` the acceptance, ``v(g)`` the time to verify ``g`` drafts and ``d`` that of one draft, drafting ``g``
    tokens gives ``expected_tokens(a, g) / (v(g) + g d)`` tokens a second, and none gives ``1 / v(0)``. The best is
    taken. Where none is best, drafting stops for some tokens, then tries again; the pause doubles. Where drafting would
    lose even if all were accepted, there is nothing to try. Drafts of different grades are judged apart.

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
        self._beliefs: dict[int | None, _Belief] = {}
        self._chosen = self._belief(None)
        self._rounds: list[tuple[int, float]] = []
        self.switched_off = 0

    def _belief(self, grade: Grade | None) -> _Belief:
        label, prior = (None, _PRIOR) if grade is None else (grade.label, grade.prior)
        if label not in self._beliefs:
            # where a draft's grade is known before it is made, that is as good as a first try
            self._beliefs[label] = _Belief(prior, probing=grade is None)
        return self._beliefs[label]

    @property
    def acceptance(self) -> float:
        """The probability that a draft like the last one is accepted, as far as is known."""
        return self._chosen.acceptance

    def choose(self, grade: Grade | None = None) -> int:
        """Tokens to draft now."""
        if self._constant:
            return self._most
        belief = self._chosen = self._belief(grade)
        # the first round measures what a forward without a draft costs
        if not self._verify or belief.waiting > 0:
            return 0
        learnt = grade is not None or self._draft.median is not None
        if belief.probing or not learnt:
            return min(self._most, _PROBE if learnt else _SECOND if self._rounds else _FIRST)
        best = self._best(belief.acceptance)
        if best == 0:
            self.switched_off += 1
            belief.wait()
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
        for belief in self._beliefs.values():
            if belief.waiting > 0:
                belief.waiting -= progress
                if belief.waiting <= 0:
                    self._resume(belief)
        if drafted == 0:
            return
        belief = self._chosen
        if not belief.probing:
            # a draft after a pause takes longer: the assistant reads what it has missed
            self._draft.add(draft_seconds / drafted)
        kept = min(progress - 1, drafted)
        belief.learn(min(kept + 1, drafted), kept)
        self._rounds.append((drafted, draft_seconds + verify_seconds))
        if belief.probing:
            belief.probing = False
            if self._best(belief.acceptance) > 0:
                belief.pause = _FIRST_PAUSE

    def _resume(self, belief: _Belief) -> None:
        if self._best(1.0) == 0:
            belief.wait()
        else:
            belief.probe()

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
