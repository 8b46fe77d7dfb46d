"""How many tokens to draft: as many as pay by what was measured in this call, none where drafting loses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from .budget import Budget
from .costs import Times, VerificationCosts

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
# a draft is at most this many times as long as the longest that was timed; the first has so many tokens: what one costs
# is no surprise
_GROWTH, _FIRST_TIMED = 2, 2


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens of one verification: ``(1 - a^(g+1)) / (1 - a)``, if each draft is accepted with probability ``a``.

    Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", 2023.
    """
    if acceptance >= 1:
        return length + 1.0
    return (1 - acceptance ** (length + 1)) / (1 - acceptance)


class _Belief:
    """What is known of drafts whose worth does not show before they are made."""

    def __init__(self) -> None:
        self.accepted, self.examined = _PRIOR * _PRIOR_WEIGHT, _PRIOR_WEIGHT
        # the next draft is to find out, whatever is believed
        self.probing = True
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


class DraftLength:
    """Chooses the draft length of each round of one call.

    With ``v(g)`` the time to verify ``g`` drafts and ``d`` that of one draft, drafting ``g`` tokens gives ``n(g)``
    tokens in ``v(g) + g d``, and none gives one in ``v(0)``. The best is taken that the `Budget` bears. ``n(g)`` comes
    from an assistant that can tell (`Drafter.forecast`), and else from the acceptance ``a`` so far:
    ``expected_tokens(a, g)``.
    Where none is best, such an assistant is left alone for some tokens, then tried again; the pause doubles. Where
    drafting would lose even if all were accepted, there is nothing to try.

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
        self._costs = VerificationCosts()
        self._draft = Times()
        self._belief = _Belief()
        self._budget = Budget()
        self._forecast = False
        self._rounds: list[tuple[int, float]] = []
        self._stopped = self._rested = False
        self.switched_off = 0

    def choose(self, forecast: Sequence[float] | None = None) -> int:
        """Tokens to draft now.

        Parameters
        ----------
        forecast
            The probability that all of the first 1, 2, ... drafts are accepted; None where nobody can tell.
        """
        if self._constant:
            return self._most
        self._forecast = forecast is not None
        # the first round measures what a forward without a draft costs
        if self.plain_step is None:
            return 0
        if forecast is not None:
            # most rounds have nothing to copy
            if not forecast or forecast[0] == 0:
                return 0
            return self._afford(list(accumulate(forecast, initial=1.0))[: self._most + 1])
        return self._believe()

    def _believe(self) -> int:
        belief = self._belief
        if belief.waiting > 0:
            return 0
        learnt = self._draft.median is not None
        if belief.probing or not learnt:
            length = min(self._most, _PROBE if learnt else _SECOND if self._rounds else _FIRST)
            return length if not learnt or self._budget.bears(self._cost(length) - 1) else 0
        tokens = [expected_tokens(belief.acceptance, length) for length in range(self._most + 1)]
        if self._best(tokens) == 0:
            self.switched_off += 1
            belief.wait()
            return 0
        return self._afford(tokens)

    def _afford(self, tokens: Sequence[float]) -> int:
        """The best length by the tokens that 0, 1, ... drafts are expected to bring, of those that may be lost."""
        costs = [self._cost(length) for length in range(len(tokens))]
        speeds = [each / cost for each, cost in zip(tokens, costs, strict=True)]
        if max(speeds) == speeds[0]:
            return 0
        timed = max(_FIRST_TIMED, _GROWTH * self._costs.longest)
        lengths = [length for length, cost in enumerate(costs) if 0 < length <= timed and self._budget.bears(cost - 1)]
        stopped, self._stopped = self._stopped, not lengths
        self.switched_off += self._stopped and not stopped
        return max([0, *lengths], key=speeds.__getitem__)

    def _best(self, tokens: Sequence[float]) -> int:
        return max(range(len(tokens)), key=lambda length: tokens[length] / self._cost(length))

    def _cost(self, length: int) -> float:
        """Drafting and verifying so many tokens, in plain forwards."""
        return self._costs.of(length) + length * (self._draft.median or 0.0) / (self.plain_step or 1.0)

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
        self._costs.add(width - 1, verify_seconds)
        belief = self._belief
        if belief.waiting > 0:
            belief.waiting -= progress
            if belief.waiting <= 0:
                self._resume()
        first = not self._rounds and not self._forecast
        if self.plain_step is not None:
            # what an assistant has to read before its first draft is not held against it; and a forward that another
            # program delayed was not made dear by its drafts, so that the usual time of its width counts
            drafting = 0.0 if first else draft_seconds / self.plain_step
            self._budget.record(progress, self._costs.timed(width - 1) + drafting)
        rested, self._rested = self._rested, drafted == 0
        if drafted == 0:
            return
        if self._forecast or not (belief.probing or rested):
            # a draft after rounds without one takes longer: the assistant reads what it has missed
            self._draft.add(draft_seconds / drafted)
        self._rounds.append((drafted, draft_seconds + verify_seconds))
        kept = min(progress - 1, drafted)
        belief.learn(min(kept + 1, drafted), kept)
        if belief.probing:
            belief.probing = False
            if self._best([expected_tokens(belief.acceptance, length) for length in range(self._most + 1)]) > 0:
                belief.pause = _FIRST_PAUSE

    def _resume(self) -> None:
        if self._best([length + 1.0 for length in range(self._most + 1)]) == 0:
            self._belief.wait()
        else:
            self._belief.probe()

    @property
    def plain_step(self) -> float | None:
        """The median time of a forward without a draft."""
        return self._costs.plain

    def predicted(self, acceptance: float | None) -> float | None:
        """The speed-up that the formula gives for the drafts of this call, over the rounds that had one."""
        if self.plain_step is None or acceptance is None or not self._rounds:
            return None
        tokens = sum(expected_tokens(acceptance, length) for length, _ in self._rounds)
        return tokens * self.plain_step / sum(seconds for _, seconds in self._rounds)
