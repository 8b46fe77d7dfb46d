"""Chunks: the same loss and the same gradients, in the memory of a chunk."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from hfkv_distill import Objective, TopK, chunked_loss, token_losses

TOKENS, WIDTH, VOCABULARY = 23, 12, 40
OBJECTIVES = [
    Objective(alpha=alpha, beta=beta, temperature=temperature)
    for alpha, beta, temperature in (
        (0, 0, 1),
        (0.3, 0, 1),
        (0, 0, 2),
        (0.3, 0, 1.5),
        (1, 0, 1),
        (1, 0, 2),
        (0, 1, 2),
        (0.3, 0.25, 1.5),
        (0.5, 0.5, 0.7),
    )
]


def identity(objective):
    return f"alpha{objective.alpha}-beta{objective.beta}-T{objective.temperature}"


class Adapted(nn.Linear):
    """A head with an adapter, as PEFT makes them."""

    def __init__(self):
        super().__init__(WIDTH, VOCABULARY)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, VOCABULARY, bias=False)

    def forward(self, states):
        return 8 * torch.tanh((super().forward(states) + self.up(self.down(states))) / 8)


def make(head_class=nn.Linear):
    torch.manual_seed(0)
    head = (Adapted() if head_class is Adapted else nn.Linear(WIDTH, VOCABULARY)).double()
    states = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    teacher = 3 * torch.randn(TOKENS, VOCABULARY, dtype=torch.float64)
    return states, head, torch.randint(VOCABULARY, (TOKENS,)), teacher


def gradients(loss, states, head):
    found = torch.autograd.grad(loss, [states, *head.parameters()])
    return torch.cat([gradient.flatten() for gradient in found])


def plain(states, head, labels, teacher, objective):
    """The formula, over all tokens at once."""
    soft, hard = token_losses(head(states), labels, teacher, objective)
    return objective.mix(soft, hard).sum()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=identity)
@pytest.mark.parametrize("chunk_size", [1, 5, 23, 100])
@pytest.mark.parametrize("head_class", [nn.Linear, Adapted])
def test_gradients_are_those_of_the_plain_formula(objective, chunk_size, head_class):
    states, head, labels, teacher = make(head_class)
    expected = plain(states, head, labels, teacher, objective)
    sums = chunked_loss(
        states, head, list(head.parameters()), labels, lambda rows: teacher[rows], objective,
        chunk_size=chunk_size, vocabulary=VOCABULARY, overwrite=head_class is nn.Linear,
    )  # fmt: skip
    assert sums.loss.item() == pytest.approx(expected.item())
    torch.testing.assert_close(gradients(3 * sums.loss, states, head), 3 * gradients(expected, states, head))
    top1 = (head(states).argmax(-1) == teacher.argmax(-1)).sum()
    assert float(sums.agreed) == float(top1)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=identity)
def test_all_outcomes_kept_is_the_full_loss(objective):
    states, head, labels, teacher = make()
    stored = TopK.of(teacher, VOCABULARY, objective.temperature)
    expected = plain(states, head, labels, teacher, objective)
    sums = chunked_loss(
        states, head, list(head.parameters()), labels, stored.__getitem__, objective, chunk_size=7,
        vocabulary=VOCABULARY,
    )  # fmt: skip
    assert sums.loss.item() == pytest.approx(expected.item())
    torch.testing.assert_close(gradients(sums.loss, states, head), gradients(expected, states, head))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=identity)
def test_few_outcomes_and_a_bucket(objective):
    states, head, labels, teacher = make()
    stored = TopK.of(teacher, 5, objective.temperature)

    def bucketed(logits, indices):
        probabilities = (logits / objective.temperature).softmax(-1)
        chosen = probabilities.gather(-1, indices)
        return torch.cat([chosen, 1 - chosen.sum(-1, keepdim=True)], dim=-1).log()

    # over buckets, logarithms of probabilities are logits: the same formula for six outcomes, at temperature 1
    over_buckets = Objective(beta=objective.beta)
    soft, _ = token_losses(
        bucketed(head(states), stored.indices),
        torch.zeros_like(labels),
        bucketed(teacher, stored.indices),
        over_buckets,
    )
    _, hard = token_losses(head(states), labels, None, objective)
    expected = objective.mix(soft * objective.temperature**2, hard).sum()
    sums = chunked_loss(
        states, head, list(head.parameters()), labels, stored.__getitem__, objective, chunk_size=7,
        vocabulary=VOCABULARY,
    )  # fmt: skip
    assert sums.loss.item() == pytest.approx(expected.item())
    torch.testing.assert_close(gradients(sums.loss, states, head), gradients(expected, states, head))


@pytest.mark.parametrize("alpha", [0, 0.5, 1])
def test_without_a_teacher_the_text_alone_counts(alpha):
    states, head, labels, _ = make()
    objective = Objective(alpha=alpha, temperature=2)
    expected = alpha * nn.functional.cross_entropy(head(states), labels, reduction="sum")
    sums = chunked_loss(
        states, head, list(head.parameters()), labels, None, objective, chunk_size=7, vocabulary=VOCABULARY
    )
    assert sums.loss.item() == pytest.approx(expected.item())
    torch.testing.assert_close(gradients(sums.loss, states, head), gradients(expected, states, head))


def test_outcomes_that_the_teacher_rules_out_cost_nothing():
    states, head, labels, teacher = make()
    teacher[:, ::3] = -torch.inf
    expected = plain(states, head, labels, teacher, Objective())
    sums = chunked_loss(
        states, head, list(head.parameters()), labels, lambda rows: teacher[rows], Objective(), chunk_size=7,
        vocabulary=VOCABULARY,
    )  # fmt: skip
    assert sums.loss.item() == pytest.approx(expected.item())
    torch.testing.assert_close(gradients(sums.loss, states, head), gradients(expected, states, head))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_divergences_of_narrow_logits(dtype):
    """Logits of twenty and more, a student that is all but its teacher: what is left of the differences is right."""
    torch.manual_seed(0)
    head = nn.Linear(VOCABULARY, VOCABULARY, bias=False).to(dtype)
    nn.init.eye_(head.weight)
    teacher = (8 * torch.randn(TOKENS, VOCABULARY) + 20).to(dtype)
    states = (teacher + (0.05 * torch.randn(TOKENS, VOCABULARY)).to(dtype)).requires_grad_()
    labels = torch.zeros(TOKENS, dtype=torch.long)
    expected, _ = token_losses(states.detach().double(), labels, teacher.double(), Objective())
    assert 0 < expected.max() < 0.05
    for ours, bound in ((states, 1e-4), (teacher.clone(), 0)):
        sums = chunked_loss(
            ours, head, [], labels, lambda rows: teacher[rows], Objective(), chunk_size=7, vocabulary=VOCABULARY
        )
        wanted = float(expected.sum()) if ours is states else 0.0
        assert abs(sums.loss.item() - wanted) <= bound * TOKENS


def test_padded_outcomes_are_none():
    states, head, labels, teacher = make()
    wide = torch.cat([teacher, torch.full((TOKENS, 8), 50.0, dtype=torch.float64)], dim=-1)
    sums = chunked_loss(
        states, head, list(head.parameters()), labels % 36, lambda rows: wide[rows], Objective(), chunk_size=7,
        vocabulary=36,
    )  # fmt: skip
    soft, _ = token_losses(head(states)[:, :36], labels % 36, teacher[:, :36], Objective())
    assert sums.loss.item() == pytest.approx(soft.sum().item())
    assert torch.autograd.grad(sums.loss, head.weight)[0][36:].abs().max() == 0


@pytest.mark.parametrize("frozen", ["head", "states"])
def test_frozen_parts_have_no_gradient(frozen):
    states, head, labels, teacher = make()
    (head if frozen == "head" else states).requires_grad_(False)
    sums = chunked_loss(
        states, head, list(head.parameters()), labels, lambda rows: teacher[rows], Objective(), chunk_size=7,
        vocabulary=VOCABULARY, overwrite=True,
    )  # fmt: skip
    sums.loss.backward()
    assert (head.weight.grad is None) == (frozen == "head")
    assert (states.grad is None) == (frozen == "states")


def test_no_target_at_all():
    states, head, labels, teacher = make()
    sums = chunked_loss(
        states[:0], head, list(head.parameters()), labels[:0], lambda rows: teacher[:0][rows], Objective(),
        chunk_size=7, vocabulary=VOCABULARY,
    )  # fmt: skip
    sums.loss.backward()
    assert sums.loss.item() == 0
    assert head.weight.grad.abs().max() == 0


def test_peak_is_that_of_a_chunk():
    tokens, width, vocabulary, chunk_size = 2048, 8, 150_000, 256
    torch.manual_seed(0)
    head, other = (nn.Linear(width, vocabulary, bias=False) for _ in range(2))
    states, theirs = torch.randn(tokens, width, requires_grad=True), torch.randn(tokens, width)

    @torch.no_grad()
    def teacher(rows):
        return other(theirs[rows])

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        sums = chunked_loss(
            states, head, [head.weight], torch.randint(vocabulary, (tokens,)), teacher, Objective(),
            chunk_size=chunk_size, vocabulary=vocabulary, overwrite=True,
        )  # fmt: skip
        sums.loss.backward()
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    peak = max(itertools.accumulate(event.nbytes() for event in events))
    # the teacher's and the student's; those of all tokens would be 8 of them
    logits = 2 * chunk_size * vocabulary * 4
    assert 1 <= peak / logits < 1.2
