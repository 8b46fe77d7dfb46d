"""The loss of many tokens in the memory of a few: logits are made, used and freed chunk by chunk.

The gradients of a chunk are taken while its logits are there, so that backward computes nothing twice: it scales what
is known. Any module that makes logits of hidden states will do: with a bias, with adapters, quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .closed_form import loss_and_gradient, share_favourites
from .losses import Objective, TopK, token_losses

# a chunk's loss is computed for this share of its tokens at a time: what autograd keeps beside the logits stays small
_PARTS = 32

Head = Callable[[torch.Tensor], torch.Tensor]
Teacher = Callable[[slice], torch.Tensor | TopK]


@dataclass(frozen=True)
class Sums:
    """Sums over tokens.

    Attributes
    ----------
    loss
        What gradients flow from.
    soft, hard
        Divergence and cross-entropy.
    agreed
        Tokens for which student and teacher have the same favourite.
    """

    loss: torch.Tensor
    soft: torch.Tensor
    hard: torch.Tensor
    agreed: torch.Tensor


def chunked_loss(
    hidden_states: torch.Tensor,
    head: Head,
    parameters: Sequence[nn.Parameter],
    labels: torch.Tensor,
    teacher: Teacher | None,
    objective: Objective,
    *,
    chunk_size: int,
    vocabulary: int,
    overwrite: bool = False,
) -> Sums:
    """The loss of tokens whose logits never exist together.

    Parameters
    ----------
    hidden_states
        The student's, as its head takes them: ``[tokens, hidden]``.
    head
        From hidden states to logits ``[tokens, at least vocabulary]``.
    parameters
        Those of the head: what it has, its gradients are for.
    labels
        The tokens that follow, ``[tokens]``.
    teacher
        The teacher's logits, or its likeliest outcomes, for some of the tokens; None without one.
    chunk_size
        Tokens whose logits exist together.
    vocabulary
        Outcomes that both models know: the first of either.
    overwrite
        Whether the head's backward gets along without the logits (that of a plain linear one does): their gradient then
        takes their place.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    job = _Job(head, trained, labels, teacher, objective, chunk_size, vocabulary, overwrite)
    if torch.is_grad_enabled() and (hidden_states.requires_grad or trained):
        return Sums(*_ChunkedLoss.apply(job, hidden_states, *trained))
    return Sums(*job.run(hidden_states, [False] * (1 + len(trained)))[0])


@dataclass(frozen=True)
class _Job:
    head: Head
    parameters: Sequence[nn.Parameter]
    labels: torch.Tensor
    teacher: Teacher | None
    objective: Objective
    chunk_size: int
    vocabulary: int
    overwrite: bool

    def run(
        self, hidden_states: torch.Tensor, wanted: Sequence[bool]
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor | None]]:
        """The sums, and the gradients of the loss that are wanted: of the hidden states, then of the parameters."""
        gradients = [
            torch.zeros_like(tensor) if asked else None
            for tensor, asked in zip((hidden_states, *self.parameters), wanted, strict=True)
        ]
        sums = torch.zeros(4, dtype=torch.float64, device=hidden_states.device)
        for start in range(0, len(hidden_states), self.chunk_size):
            rows = slice(start, start + self.chunk_size)
            sums += self._chunk(hidden_states, rows, gradients)
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        # tensors of their own, which the caller may scale in place
        return tuple(value.to(wide, copy=True) for value in sums), gradients

    def _chunk(self, hidden_states: torch.Tensor, rows: slice, gradients: list[torch.Tensor | None]) -> torch.Tensor:
        wanted = any(gradient is not None for gradient in gradients)
        states = hidden_states[rows].detach().requires_grad_(gradients[0] is not None)
        with torch.set_grad_enabled(wanted):
            logits = self.head(states)[..., : self.vocabulary]
        teacher = None if self.teacher is None else self.teacher(rows)
        if isinstance(teacher, torch.Tensor):
            teacher = teacher[..., : self.vocabulary]
        gradient = None
        if wanted:
            gradient = logits.detach() if self.overwrite else torch.empty_like(logits)
        sums = self._parts(logits.detach(), self.labels[rows], teacher, gradient)
        if gradient is None:
            return sums
        del teacher
        sources: list[Any] = [states, *self.parameters]
        indices = [index for index, total in enumerate(gradients) if total is not None]
        found = torch.autograd.grad(logits, [sources[i] for i in indices], gradient, allow_unused=True)
        for index, part in zip(indices, found, strict=True):
            total = gradients[index]
            if part is not None and total is not None:
                (total[rows] if index == 0 else total).add_(part)
        return sums

    def _parts(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        teacher: torch.Tensor | TopK | None,
        gradient: torch.Tensor | None,
    ) -> torch.Tensor:
        """The sums of a chunk; the gradient of its logits is written where it is wanted."""
        sums = torch.zeros(4, dtype=torch.float64, device=logits.device)
        size = max(1, len(logits) // _PARTS)
        for start in range(0, len(logits), size):
            rows = slice(start, start + size)
            theirs = None if teacher is None else teacher[rows]
            written = None if gradient is None else gradient[rows]
            if isinstance(theirs, TopK) or (theirs is not None and self.objective.beta != 0):
                sums += _by_autograd(logits[rows], labels[rows], theirs, self.objective, written)
            else:
                sums += loss_and_gradient(logits[rows], labels[rows], theirs, self.objective, written)
        return sums


def _by_autograd(
    logits: torch.Tensor,
    labels: torch.Tensor,
    teacher: torch.Tensor | TopK,
    objective: Objective,
    gradient: torch.Tensor | None,
) -> torch.Tensor:
    """As `loss_and_gradient`, for every objective and for outcomes in a bucket."""
    # their gradient is written over them when it is known
    ours = logits.detach().requires_grad_(gradient is not None)
    with torch.set_grad_enabled(gradient is not None):
        soft, hard = token_losses(ours, labels, teacher, objective)
        loss = objective.mix(soft, hard).sum()
    sums = torch.stack([loss, soft.sum(), hard.sum(), _agreed(logits, teacher)]).detach()
    if gradient is not None:
        gradient.copy_(torch.autograd.grad(loss, ours)[0])
    return sums


def _agreed(logits: torch.Tensor, teacher: torch.Tensor | TopK) -> torch.Tensor:
    if isinstance(teacher, torch.Tensor):
        return share_favourites(logits, teacher).sum()
    favourite = teacher.indices.gather(-1, teacher.log_probabilities[..., :-1].argmax(-1, keepdim=True))[..., 0]
    return (logits.argmax(-1) == favourite).sum().float()


class _ChunkedLoss(torch.autograd.Function):
    """Gradients that were taken with the loss."""

    @staticmethod
    def forward(ctx: Any, job: _Job, hidden_states: torch.Tensor, *parameters: nn.Parameter) -> Any:
        """The sums of a job; only the loss has a gradient."""
        sums, gradients = job.run(hidden_states, ctx.needs_input_grad[1:])
        ctx.has_gradient = [gradient is not None for gradient in gradients]
        ctx.save_for_backward(*(gradient for gradient in gradients if gradient is not None))
        ctx.mark_non_differentiable(*sums[1:])
        return sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        """What is known, times the gradient of the loss."""
        saved = iter(ctx.saved_tensors)
        scaled = [next(saved) * gradient if has else None for has in ctx.has_gradient]
        return None, *scaled
