"""How sure a measured number is: intervals for shares and for means of correlated values.

Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", 1927; Künsch, "The Jackknife and the
Bootstrap for General Stationary Observations", 1989 (resampling blocks, because neighbouring tokens resemble).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch

LEVEL = 0.95
DRAWS = 2000


@dataclass(frozen=True)
class Estimate:
    """A number and the interval in which its true value lies, as far as the sample can tell.

    Attributes
    ----------
    value
        What was measured.
    low, high
        The ends of the 95 % interval.
    """

    value: float
    low: float
    high: float

    def separates(self, other: Estimate) -> bool:
        """Whether the two intervals have nothing in common."""
        return self.low > other.high or other.low > self.high


def share(successes: int, total: int, level: float = LEVEL) -> Estimate:
    """The share of successes with its Wilson interval, which stays inside 0 and 1 and works for few trials.

    Raises
    ------
    ValueError
        No trials, or more successes than trials.
    """
    if not 0 <= successes <= total or total == 0:
        raise ValueError(f"successes={successes} must be from 0 to total={total}, and total at least 1")
    z = NormalDist().inv_cdf((1 + level) / 2)
    found = successes / total
    middle = (found + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(found * (1 - found) / total + z * z / (4 * total * total))
    # at the ends the formula is exact, rounding is not
    low = 0.0 if successes == 0 else middle - half
    high = 1.0 if successes == total else middle + half
    return Estimate(found, low, high)


def mean(blocks: Sequence[torch.Tensor], level: float = LEVEL, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """The mean over all elements, with a bootstrap interval that draws whole blocks.

    Parameters
    ----------
    blocks
        1-D tensors of values that may be correlated inside a block, such as the tokens of one chunk.
    """
    if not blocks:
        raise ValueError("there is nothing to average: no blocks")
    sums = torch.stack([block.double().sum() for block in blocks])
    counts = torch.tensor([len(block) for block in blocks], dtype=torch.float64)
    value = float(sums.sum() / counts.sum())
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(blocks), (draws, len(blocks)), generator=generator)
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    tail = (1 - level) / 2
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    # with one block, or equal ones, rounding could leave the value outside
    return Estimate(value, min(low, value), max(high, value))


def exponential(estimate: Estimate) -> Estimate:
    """The exponential of a number and of its interval: a perplexity from a mean loss."""
    return Estimate(math.exp(estimate.value), math.exp(estimate.low), math.exp(estimate.high))
