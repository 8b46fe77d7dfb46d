"""The intervals, against closed forms and against what they promise."""

from __future__ import annotations

import math

import pytest
import torch

from hfkv_lab.intervals import Estimate, exponential, mean, share


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    # Newcombe, "Two-sided confidence intervals for the single proportion", 1998, table I, method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_is_the_published_one(successes, total, low, high):
    found = share(successes, total)
    assert found.value == successes / total
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)


@pytest.mark.parametrize("total", [1, 7, 400])
def test_wilson_solves_its_equation(total):
    # the ends are the shares p whose distance to what was found is z standard errors of p
    for successes in range(total + 1):
        found = share(successes, total)
        for end in (found.low, found.high):
            if 0 < end < 1:
                assert abs(found.value - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / total), rel=1e-5)
        assert 0 <= found.low <= found.value <= found.high <= 1


@pytest.mark.parametrize(("successes", "total"), [(0, 0), (5, 4), (-1, 4)])
def test_impossible_counts_are_refused(successes, total):
    with pytest.raises(ValueError, match="successes="):
        share(successes, total)


def test_bootstrap_of_independent_values_is_the_normal_interval():
    values = torch.randn(4000, generator=torch.Generator().manual_seed(1)) + 3
    found = mean(list(values.split(1)))
    half = 1.96 * float(values.std()) / math.sqrt(len(values))
    assert found.value == pytest.approx(float(values.mean()))
    assert found.value - found.low == pytest.approx(half, rel=0.1)
    assert found.high - found.value == pytest.approx(half, rel=0.1)


def test_bootstrap_of_correlated_values_is_as_wide_as_the_blocks_ask():
    # 16 equal values in each block: as sure as one value a block, and no surer
    values = torch.randn(500, generator=torch.Generator().manual_seed(2))
    blocks = mean([value.repeat(16) for value in values.split(1)])
    alone = mean(list(values.split(1)))
    assert (blocks.low, blocks.high) == pytest.approx((alone.low, alone.high))
    naive = mean(list(values.repeat_interleave(16).split(1)))
    assert (blocks.high - blocks.low) / (naive.high - naive.low) == pytest.approx(4, rel=0.15)


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    generator = torch.Generator().manual_seed(3)
    covered = 0
    for seed in range(200):
        found = mean(list(torch.randn(60, generator=generator).split(1)), draws=500, seed=seed)
        covered += found.low <= 0 <= found.high
    # 95 % of 200 is 190, with a standard deviation of 3
    assert 178 <= covered <= 198


def test_bootstrap_weighs_blocks_by_their_length():
    blocks = [torch.ones(16), torch.zeros(4)]
    assert mean(blocks).value == pytest.approx(0.8)
    assert mean([torch.ones(3)]) == Estimate(1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="no blocks"):
        mean([])


def test_bootstrap_is_the_same_on_every_call():
    blocks = list(torch.randn(50, generator=torch.Generator().manual_seed(4)).split(5))
    assert mean(blocks) == mean(blocks)
    assert mean(blocks, seed=1) != mean(blocks)


def test_separation_and_exponential():
    assert Estimate(1, 0.5, 1.5).separates(Estimate(2, 1.6, 2.4))
    assert not Estimate(1, 0.5, 1.5).separates(Estimate(2, 1.5, 2.5))
    assert exponential(Estimate(0.0, -1.0, 1.0)) == Estimate(1.0, math.exp(-1), math.e)
