"""The draft length follows what was measured, against a simulated machine whose best length is known."""

from __future__ import annotations

import random

import pytest

from hfkv.speculation.control import DraftLength, Grade, expected_tokens


def simulate(acceptance, draft_cost, verify_slope, tokens=2000, most=8, seed=0, noise=0.05):
    """Decode on a machine where a plain step takes 1; return the length controller, the time and the lengths.

    An assistant that has not drafted in the last round reads what it missed, which takes as long as two drafts; the
    prompt takes as long as five.
    """
    chance = random.Random(seed)
    length = DraftLength(most, "measured")
    done, time, lengths = 0, 0.0, []

    def took(seconds):
        return seconds * (1 + noise * abs(chance.gauss(0, 1)))

    while done < tokens:
        rate = acceptance(done) if callable(acceptance) else acceptance
        drafted = length.choose()
        kept = 0
        while kept < drafted and chance.random() < rate:
            kept += 1
        missed = 0 if not drafted or (lengths and lengths[-1]) else 2 if any(lengths) else 5
        draft, verify = took(draft_cost * (drafted + missed)), took(1 + verify_slope * drafted)
        length.record(drafted + 1, drafted, kept + 1, draft, verify)
        done, time = done + kept + 1, time + draft + verify
        lengths.append(drafted)
    return length, time, lengths


def best_time(acceptance, draft_cost, verify_slope, tokens=2000, most=8):
    costs = [
        (1 + (draft_cost + verify_slope) * length) / expected_tokens(acceptance, length) for length in range(most + 1)
    ]
    return tokens * min(costs)


def test_expected_tokens_is_the_mean_of_runs():
    chance = random.Random(0)
    for rate, length in ((0.3, 4), (0.8, 4), (0.95, 8), (1.0, 3), (0.0, 5)):
        runs = []
        for _ in range(20_000):
            kept = 0
            while kept < length and chance.random() < rate:
                kept += 1
            runs.append(kept + 1)
        assert sum(runs) / len(runs) == pytest.approx(expected_tokens(rate, length), rel=0.02)


@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("draft_cost", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("verify_slope", [0.01, 0.1])
def test_time_is_near_that_of_the_best_fixed_length(acceptance, draft_cost, verify_slope):
    times = [simulate(acceptance, draft_cost, verify_slope, seed=seed)[1] for seed in range(3)]
    # 4 % is the mean of the noise: nothing is faster than noise allows
    assert sum(times) / 3 <= 1.04 * 1.08 * best_time(acceptance, draft_cost, verify_slope)


@pytest.mark.parametrize("draft_cost", [0.02, 0.3, 1.0, 3.0])
def test_a_wrong_assistant_costs_little(draft_cost):
    plain = simulate(0.0, 0.0, 0.0, tokens=256, most=0)[1]
    times = [simulate(0.0, draft_cost, 0.03, tokens=256, seed=seed)[1] for seed in range(10)]
    # reading the prompt is not drafting
    assert sum(times) / 10 <= 1.05 * plain + 5 * draft_cost


def test_drafting_resumes_when_the_text_becomes_predictable():
    length, _, lengths = simulate(lambda done: 0.0 if done < 300 else 0.95, 0.05, 0.03, tokens=1500)
    assert length.switched_off > 0
    assert sum(lengths[-50:]) / 50 > 5


def test_drafting_stops_when_the_text_becomes_unpredictable():
    _, _, lengths = simulate(lambda done: 0.95 if done < 300 else 0.0, 0.3, 0.03, tokens=1000)
    assert sum(lengths[20:40]) / 20 > 3
    assert sum(lengths[-200:]) / 200 < 0.2


def test_what_cannot_win_is_not_tried_again():
    _, _, lengths = simulate(0.99, 1.5, 0.05)
    assert [drafted for drafted in lengths if drafted] == [1, 2]


def test_constant_is_constant():
    length = DraftLength(5, "constant")
    for _ in range(10):
        assert length.choose() == 5
        length.record(6, 5, 1, 9.0, 1.0)


def test_grades_are_judged_apart():
    # of drafts that look good nine in ten are accepted, of the others one in twenty: those are left, not all drafting
    chance = random.Random(3)
    control = DraftLength(8, "measured")
    good, poor = Grade(9, 0.8), Grade(1, 0.5)
    control.record(1, 0, 1, 0.0, 1.0)
    drafted = {good: 0, poor: 0}
    rounds = {good: 0, poor: 0}
    for _ in range(400):
        grade = good if chance.random() < 0.5 else poor
        length = control.choose(grade)
        kept = 0
        while kept < length and chance.random() < (0.9 if grade is good else 0.05):
            kept += 1
        control.record(1 + length, length, kept + 1, 0.0, 1 + 0.15 * length)
        drafted[grade] += length
        rounds[grade] += 1
    assert drafted[good] > 3 * rounds[good]
    assert drafted[poor] < 0.5 * rounds[poor]


def test_a_graded_draft_needs_no_first_try():
    control = DraftLength(16, "measured")
    control.record(1, 0, 1, 0.0, 1.0)
    assert control.choose(Grade(9, 0.9)) == 16
    ungraded = DraftLength(16, "measured")
    ungraded.record(1, 0, 1, 0.0, 1.0)
    assert ungraded.choose() == 1
