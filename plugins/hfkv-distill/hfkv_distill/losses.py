"""Divergences between the next-token distributions of a teacher and a student, token by token.

The generalised Jensen-Shannon divergence of *On-Policy Distillation of Language Models: Learning from Self-Generated
Mistakes* (Agarwal et al., 2024), with the two Kullback-Leibler divergences at its ends.
"""

from __future__ import annotations

import math

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
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return torch.log_softmax(logits.to(wide) / temperature, dim=-1)


def _kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    # an outcome that the first rules out costs nothing, whatever the second says: no -inf minus -inf
    possible = first > -math.inf
    difference = torch.where(possible, first, 0) - torch.where(possible, second, 0)
    return (first.exp() * difference).sum(dim=-1)
