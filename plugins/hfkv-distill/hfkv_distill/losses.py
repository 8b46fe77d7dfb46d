"""Divergences between the next-token distributions of a teacher and a student, token by token.

The generalised Jensen-Shannon divergence of *On-Policy Distillation of Language Models: Learning from Self-Generated
Mistakes* (Agarwal et al., 2024), with the two Kullback-Leibler divergences at its ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


def check(beta: float, temperature: float) -> None:
    """Raise ValueError for settings that no divergence has."""
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta!r} must be from 0 (forward KL) to 1 (reverse KL)")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature={temperature!r} must be above 0")


def divergence(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, *, beta: float = 0.0, temperature: float = 1.0
) -> torch.Tensor:
    """The divergence of each token, times the square of the temperature.

    With the teacher's ``p`` and the student's ``q``: ``KL(p || q)`` for ``beta=0``, ``KL(q || p)`` for ``beta=1``, and
    between them ``beta KL(p || m) + (1 - beta) KL(q || m)`` with ``m = beta p + (1 - beta) q``.

    Parameters
    ----------
    student_logits, teacher_logits
        ``[..., vocabulary]``; one of -inf is an outcome that has probability 0.
    temperature
        Divides the logits. Gradients shrink with its square, which the factor makes up for (*Distilling the Knowledge
        in a Neural Network*, Hinton et al., 2015).

    Returns
    -------
    torch.Tensor
        ``[...]``, float32 or wider, at least 0.
    """
    check(beta, temperature)
    student = _log_softmax(student_logits, temperature)
    teacher = _log_softmax(teacher_logits, temperature)
    return between(teacher, student, beta) * temperature**2


def between(teacher: torch.Tensor, student: torch.Tensor, beta: float) -> torch.Tensor:
    """The divergence of log-probabilities ``[..., outcomes]``: ``[...]``."""
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(wide if temperature == 1 else wide / temperature, dim=-1)


def _kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    # an outcome that the first rules out costs nothing, whatever the second says: no -inf minus -inf
    difference = torch.where(first > -math.inf, first - second, 0)
    return (first.exp() * difference).sum(dim=-1)


@dataclass(frozen=True)
class TopK:
    """The likeliest outcomes of a teacher, and one bucket for all others.

    Attributes
    ----------
    indices
        ``[tokens, k]`` int64.
    log_probabilities
        ``[tokens, k + 1]``, those of the softmax at the temperature of the loss; the last is the bucket's.
    """

    indices: torch.Tensor
    log_probabilities: torch.Tensor

    def __getitem__(self, rows: slice) -> TopK:
        """Some of the tokens."""
        return TopK(self.indices[rows], self.log_probabilities[rows])

    @staticmethod
    def of(logits: torch.Tensor, k: int, temperature: float = 1.0) -> TopK:
        """The ``k`` likeliest outcomes of logits ``[tokens, vocabulary]``."""
        if not 1 <= k <= logits.shape[-1]:
            raise ValueError(f"top_k={k!r} must be from 1 to the size of the vocabulary, {logits.shape[-1]}")
        log_probabilities = _log_softmax(logits, temperature)
        indices = log_probabilities.topk(k, dim=-1).indices
        return TopK(indices, _buckets(log_probabilities, indices))


def _buckets(log_probabilities: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of some outcomes and of the rest: ``[tokens, k + 1]``."""
    chosen = log_probabilities.gather(-1, indices)
    if indices.shape[-1] == log_probabilities.shape[-1]:
        # nothing is left; the sum of nothing has no gradient either
        rest = chosen.new_full((*chosen.shape[:-1], 1), -math.inf)
    else:
        rest = log_probabilities.scatter(-1, indices, -math.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([chosen, rest], dim=-1)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What the loss of a token is: ``alpha`` times cross-entropy, ``1 - alpha`` times the divergence.

    Parameters
    ----------
    alpha
        Share of the hard labels.
    beta
        0 is forward KL, 1 reverse KL, between them the generalised Jensen-Shannon divergence.
    temperature
        Softens both distributions of the divergence, whose gradient is kept by its square.
    """

    alpha: float = 0.0
    beta: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Refuse values that no loss has."""
        check(self.beta, self.temperature)
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha!r} must be from 0 (the teacher alone) to 1 (the hard labels alone)")

    @property
    def needs_teacher(self) -> bool:
        """Whether the divergence counts."""
        return self.alpha < 1

    def mix(self, soft: torch.Tensor, hard: torch.Tensor) -> torch.Tensor:
        """The loss, of divergence and cross-entropy."""
        # a share of nothing may be of infinity
        parts = [share * part for share, part in ((1 - self.alpha, soft), (self.alpha, hard)) if share]
        return sum(parts[1:], parts[0])


def token_losses(
    logits: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor | TopK | None, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divergence and cross-entropy of each token.

    Parameters
    ----------
    logits
        The student's, ``[tokens, vocabulary]``.
    labels
        The token that follows, ``[tokens]``.
    teacher
        Its logits ``[tokens, vocabulary]`` or its likeliest outcomes; None without one.

    Returns
    -------
    tuple
        Two of ``[tokens]``; the divergence is 0 where there is no teacher.
    """
    temperature = objective.temperature
    student = _log_softmax(logits, temperature)
    # at temperature 1 the divergence's own log-probabilities serve
    plain = student if temperature == 1 else _log_softmax(logits, 1)
    hard = -plain.gather(-1, labels[..., None])[..., 0]
    if teacher is None:
        return torch.zeros_like(hard), hard
    if isinstance(teacher, TopK):
        student = _buckets(student, teacher.indices)
        theirs = teacher.log_probabilities.to(student.dtype)
        if teacher.indices.shape[-1] == logits.shape[-1]:
            student, theirs = student[..., :-1], theirs[..., :-1]
    else:
        theirs = _log_softmax(teacher, temperature)
    return between(theirs, student, objective.beta) * temperature**2, hard
