"""Divergences: closed forms over three tokens."""

from __future__ import annotations

import math

import pytest
import torch

from hfkv_distill import divergence

P, Q = (0.7, 0.2, 0.1), (0.2, 0.5, 0.3)


def kl(first, second):
    return sum(a * math.log(a / b) for a, b in zip(first, second, strict=True))


def mixed(beta):
    mixture = [beta * p + (1 - beta) * q for p, q in zip(P, Q, strict=True)]
    return beta * kl(P, mixture) + (1 - beta) * kl(Q, mixture)


# kl(P, Q) and kl(Q, P) written out, so that the formula of this file is compared with a number too
CLOSED = {0.0: 0.583815, 0.25: mixed(0.25), 0.5: mixed(0.5), 1.0: 0.537176}


def test_numbers_of_this_file():
    assert kl(P, Q) == pytest.approx(0.7 * math.log(3.5) - 0.2 * math.log(2.5) - 0.1 * math.log(3))
    assert kl(P, Q) == pytest.approx(CLOSED[0.0], abs=1e-5)
    assert kl(Q, P) == pytest.approx(CLOSED[1.0], abs=1e-5)


@pytest.mark.parametrize("beta", CLOSED)
def test_closed_form(beta):
    student, teacher = torch.tensor(Q).log() + 3, torch.tensor(P).log() - 1
    assert float(divergence(student, teacher, beta=beta)) == pytest.approx(CLOSED[beta], abs=1e-5)


@pytest.mark.parametrize("beta", CLOSED)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_equal_distributions_cost_nothing(beta, temperature):
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    assert divergence(logits, logits + 5, beta=beta, temperature=temperature).abs().max() < 1e-5


def test_half_is_symmetric():
    student, teacher = torch.tensor(Q).log(), torch.tensor(P).log()
    assert divergence(student, teacher, beta=0.5) == pytest.approx(float(divergence(teacher, student, beta=0.5)))


def test_temperature_is_squared():
    student, teacher = torch.tensor(Q).log(), torch.tensor(P).log()
    powers = [[value**0.5 for value in values] for values in (P, Q)]
    soft = [[value / sum(values) for value in values] for values in powers]
    assert float(divergence(student, teacher, temperature=2.0)) == pytest.approx(4 * kl(*soft), abs=1e-5)


def test_impossible_outcome_costs_nothing():
    student = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    loss = divergence(student, torch.tensor([1.0, 2.0, -math.inf]))
    loss.backward()
    assert loss.isfinite()
    assert student.grad.isfinite().all()


@pytest.mark.parametrize(("beta", "temperature"), [(-0.1, 1), (1.1, 1), (0, 0), (0, math.inf)])
def test_settings_that_are_none(beta, temperature):
    with pytest.raises(ValueError, match=r"beta=|temperature="):
        divergence(torch.zeros(3), torch.zeros(3), beta=beta, temperature=temperature)
