"""How sure a measured number is: intervals for shares and for means of correlated values.

Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", 1927; Künsch, "The Jackknife and the
Bootstrap for General Stationary Observations", 1989 (resampling blocks, because neighbouring tokens resemble);
Hesterberg, "What Teachers Should Know About the Bootstrap", 2015 (percentiles further out, because few blocks vary less
than what they are drawn from); Kish, "Survey Sampling", 1965 (how many independent trials correlated ones are worth).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch

LEVEL = 0.95
DRAWS = 2000
# tokens of a block: on text, divergences of neighbouring 16 still correlate by a third, those of 64 hardly
BLOCK = 64
# where there are too few tokens for so many blocks, the blocks are shorter
BLOCKS = 16


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


def blocks(windows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Windows of values in order, each a 1-D tensor, cut into blocks that are taken as independent."""
    total = sum(len(window) for window in windows)
    length = min(BLOCK, max(1, total // BLOCKS))
    return [block for window in windows for block in window.split(length)]


def share(successes: float, total: float, level: float = LEVEL) -> Estimate:
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


def share_of_sums(successes: Sequence[int], counts: Sequence[int], level: float = LEVEL) -> Estimate:
    """`share` of trials that are correlated inside blocks: with as many trials as independent ones would tell as much.

    Parameters
    ----------
    successes, counts
        Of each block.
    """
    total, number = sum(counts), len(counts)
    found = sum(successes) / total
    independent = found * (1 - found) / total
    effect = 1.0
    if number > 1 and independent > 0:
        spread = sum((mine - found * count) ** 2 for mine, count in zip(successes, counts, strict=True))
        effect = max(1.0, number / (number - 1) * spread / total**2 / independent)
    return share(sum(successes) / effect, total / effect, level)


def mean(blocks: Sequence[torch.Tensor], level: float = LEVEL, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """The mean over all elements, with a bootstrap interval that draws whole blocks.

    Parameters
    ----------
    blocks
        1-D tensors of values that may be correlated inside a block.
    """
    sums, counts = [float(block.double().sum()) for block in blocks], [len(block) for block in blocks]
    return mean_of_sums(sums, counts, level, draws, seed)


def mean_of_sums(
    sums: Sequence[float], counts: Sequence[int], level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> Estimate:
    """`mean` of blocks of which only the sums and the lengths were kept.

    Raises
    ------
    ValueError
        Fewer than two blocks: one alone does not show how much blocks vary.
    """
    if len(sums) < 2:
        raise ValueError(f"{len(sums)} values have a mean and no interval. Fix: measure more tokens (--tokens)")
    totals, lengths = torch.tensor(sums, dtype=torch.float64), torch.tensor(counts, dtype=torch.float64)
    value = float(totals.sum() / lengths.sum())
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(totals), (draws, len(totals)), generator=generator)
    means = totals[drawn].sum(1) / lengths[drawn].sum(1)
    tail = _tail(level, len(sums))
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    # of equal blocks, rounding could leave the value outside
    return Estimate(value, min(low, value), max(high, value))


def _tail(level: float, number: int) -> float:
    """The share of draws below the interval: that which gives normal values the interval of Student's t."""
    normal, freedom = NormalDist(), number - 1
    z = normal.inv_cdf((1 + level) / 2)
    # Abramowitz and Stegun, "Handbook of Mathematical Functions", 1964, 26.7.5
    student = (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
    return normal.cdf(-student * math.sqrt(number / freedom))


def exponential(estimate: Estimate) -> Estimate:
    """The exponential of a number and of its interval: a perplexity from a mean loss."""
    return Estimate(math.exp(estimate.value), math.exp(estimate.low), math.exp(estimate.high))
