"""What a forward of several columns costs, in forwards of one, from few and noisy times."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

# where nothing was measured: what SmolLM2 in bfloat16 takes on two cores (1.10 for one draft, 1.33 for sixteen),
# rounded up; it counts as much as one measured time
_FIRST_DRAFT, _EACH_DRAFT = 0.12, 0.02


class Times:
    """The median of the newest times of one thing."""

    def __init__(self) -> None:
        self._held: deque[float] = deque(maxlen=9)
        # asked for more often than a time is added
        self.median: float | None = None

    @property
    def count(self) -> int:
        """How many times the median is of."""
        return len(self._held)

    def add(self, seconds: float) -> None:
        """Take a time; the oldest goes."""
        self._held.append(seconds)
        self.median = statistics.median(self._held)


class VerificationCosts:
    """The time of a forward by the number of its drafts.

    A single time can be far off, and a length that looks dear is not tried again. So one time counts for half, the
    prior for the rest; and since more drafts take no less, times that say so are averaged. Between what was measured,
    costs are on a line; beyond, on that from the plain forward through the longest.
    """

    def __init__(self) -> None:
        self._times: dict[int, Times] = {}
        self._costs: dict[int, float] = {}

    def add(self, drafts: int, seconds: float) -> None:
        """Take the time of a forward."""
        self._times.setdefault(drafts, Times()).add(seconds)
        self._costs = self._fitted()

    @property
    def plain(self) -> float | None:
        """The median time of a forward without a draft."""
        times = self._times.get(0)
        return None if times is None else times.median

    @property
    def longest(self) -> int:
        """The most drafts whose forward was measured."""
        return max(self._times, default=0)

    def timed(self, drafts: int) -> float:
        """The median of such forwards alone, in plain ones; both have been timed."""
        return (self._times[drafts].median or 0.0) / (self.plain or 1.0)

    def of(self, drafts: int) -> float:
        """What a forward that verifies so many drafts costs, in plain forwards; at least 1."""
        if drafts == 0:
            return 1.0
        if len(self._costs) < 2:
            return _prior(drafts)
        below = max(point for point in self._costs if point <= drafts)
        above = min((point for point in self._costs if point > drafts), default=None)
        first, last = (0, below) if above is None else (below, above)
        slope = (self._costs[last] - self._costs[first]) / (last - first) if last > first else 0.0
        return self._costs[below] + slope * (drafts - below)

    def _fitted(self) -> dict[int, float]:
        if self.plain is None:
            return {}
        found = {
            drafts: ((times.median or 0.0) / self.plain * times.count + _prior(drafts)) / (times.count + 1)
            for drafts, times in self._times.items()
            if drafts
        }
        counts = {drafts: self._times[drafts].count + 1.0 for drafts in found}
        return {0: 1.0} | {drafts: max(1.0, cost) for drafts, cost in increasing(found, counts).items()}


def _prior(drafts: int) -> float:
    return 1 + _FIRST_DRAFT + _EACH_DRAFT * (drafts - 1)


def increasing(values: Mapping[int, float], weights: Mapping[int, float]) -> dict[int, float]:
    """The increasing values nearest to these, by weighted least squares.

    Neighbours that fall are pooled until none do: Ayer, Brunk, Ewing, Reid, Silverman, "An Empirical Distribution
    Function for Sampling with Incomplete Information", 1955.
    """
    # each pool: its mean, its weight and its keys
    pools: list[tuple[float, float, list[int]]] = []
    for key in sorted(values):
        mean, weight, keys = values[key], weights[key], [key]
        while pools and pools[-1][0] > mean:
            before, heavy, earlier = pools.pop()
            mean = (mean * weight + before * heavy) / (weight + heavy)
            weight, keys = weight + heavy, earlier + keys
        pools.append((mean, weight, keys))
    return {key: mean for mean, _, keys in pools for key in keys}
