"""The intervals, against closed forms and against what they promise."""

from __future__ import annotations

import math

import pytest
import torch

from hfkv_lab.intervals import Estimate, blocks, exponential, mean, share, share_of_sums


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


@pytest.mark.parametrize("number", [10, 60])
def test_bootstrap_covers_the_truth_about_as_often_as_it_says(number):
    generator = torch.Generator().manual_seed(3)
    covered = 0
    for seed in range(300):
        found = mean(list(torch.randn(number, generator=generator).split(1)), draws=500, seed=seed)
        covered += found.low <= 0 <= found.high
    # 95 % of 300 is 285, with a standard deviation of 4; percentiles as they are cover 90 % of the time with 10 blocks
    assert 275 <= covered <= 295


@pytest.mark.parametrize("number", [4, 10, 30])
def test_bootstrap_of_few_values_is_the_interval_of_student(number):
    # 97.5 % of Student's t, from the tables
    student = {4: 3.182, 10: 2.262, 30: 2.045}[number]
    values = torch.randn(number, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    found = mean(list(values.split(1)), draws=50_000)
    half = student * float(values.std()) / math.sqrt(number)
    # the bootstrap of four values is no normal distribution
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.3 if number == 4 else 0.06)


def test_bootstrap_weighs_blocks_by_their_length():
    assert mean([torch.ones(16), torch.zeros(4)]).value == pytest.approx(0.8)
    assert mean([torch.ones(3), torch.ones(2)]) == Estimate(1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"1 values have a mean and no interval. Fix: measure more tokens"):
        mean([torch.ones(3)])


def test_blocks_stay_inside_their_window():
    lengths = [len(block) for block in blocks([torch.zeros(600), torch.zeros(500)])]
    assert lengths == [*[64] * 9, 24, *[64] * 7, 52]
    # few tokens: sixteen blocks all the same
    assert [len(block) for block in blocks([torch.zeros(40)])] == [2] * 20
    assert [len(block) for block in blocks([torch.zeros(3)])] == [1] * 3


def test_share_of_correlated_trials_is_that_of_fewer_independent_ones():
    independent = share(300, 400)
    # blocks that vary no more than chance would have it
    assert share_of_sums([3] * 100, [4] * 100) == independent
    # each block all or nothing: four trials tell as much as one, but for the blocks' own number
    found = share_of_sums([4] * 75 + [0] * 25, [4] * 100)
    assert found.value == pytest.approx(independent.value)
    alone = share(75 * 0.99, 100 * 0.99)
    assert (found.low, found.high) == pytest.approx((alone.low, alone.high))
    assert share_of_sums([4, 4], [4, 4]) == share(8, 8)


def test_share_of_correlated_trials_covers_the_truth():
    generator = torch.Generator().manual_seed(5)
    covered = {"blocks": 0, "tokens": 0}
    for _ in range(300):
        # a share of its own in each of 24 blocks of 64 tokens, 9/10 on average: Beta(9, 1)
        shares = torch.rand(24, generator=generator) ** (1 / 9)
        same = torch.bernoulli(shares[:, None].expand(24, 64), generator=generator).sum(1).int().tolist()
        for name, found in (("blocks", share_of_sums(same, [64] * 24)), ("tokens", share(sum(same), 24 * 64))):
            covered[name] += found.low <= 0.9 <= found.high
    assert covered["blocks"] >= 270
    assert covered["tokens"] < 210


def test_bootstrap_is_the_same_on_every_call():
    blocks = list(torch.randn(50, generator=torch.Generator().manual_seed(4)).split(5))
    assert mean(blocks) == mean(blocks)
    assert mean(blocks, seed=1) != mean(blocks)


def test_separation_and_exponential():
    assert Estimate(1, 0.5, 1.5).separates(Estimate(2, 1.6, 2.4))
    assert not Estimate(1, 0.5, 1.5).separates(Estimate(2, 1.5, 2.5))
    assert exponential(Estimate(0.0, -1.0, 1.0)) == Estimate(1.0, math.exp(-1), math.e)
