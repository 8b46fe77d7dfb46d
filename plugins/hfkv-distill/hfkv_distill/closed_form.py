"""The loss of tokens and its gradient in closed form, where it has a short one: forward KL and cross-entropy.

With the student's softmax ``q`` and the teacher's ``p`` at temperature ``T``, the divergence ``T² KL(p || q)`` has the
gradient ``T (q - p)`` in the student's logits; cross-entropy has ``softmax - one-hot``. Two exponentials per outcome
and no graph: autograd takes several passes more over what is as large as the vocabulary.
"""

from __future__ import annotations

import torch

from .losses import Objective


@torch.no_grad()
def loss_and_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    teacher: torch.Tensor | None,
    objective: Objective,
    gradient: torch.Tensor | None,
) -> torch.Tensor:
    """Sums over tokens: the loss, the divergence, the cross-entropy, and favourites that agree.

    Parameters
    ----------
    logits, teacher
        ``[tokens, vocabulary]``; the teacher's are None without one.
    labels
        ``[tokens]``.
    objective
        One with forward KL, where there is a teacher.
    gradient
        As the logits, which it may be: where the gradient of the loss is written. None where it is not wanted.
    """
    temperature, alpha = objective.temperature, objective.alpha
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = wide if temperature == 1 else wide / temperature
    student = scaled.softmax(-1)
    plain = student if temperature == 1 else wide.softmax(-1)
    hard = _log_total(wide, plain) - wide.gather(-1, labels[:, None])[:, 0]
    soft = agreed = torch.zeros_like(hard)
    taught = None
    if teacher is not None:
        theirs = teacher.to(wide.dtype)
        theirs = theirs if temperature == 1 else theirs / temperature
        taught = theirs.softmax(-1)
        # an outcome that the teacher rules out costs nothing, whatever the student says: 0 times what is finite
        ahead = (theirs - scaled).nan_to_num_(0.0)
        soft = torch.linalg.vecdot(taught, ahead) - _log_total(theirs, taught) + _log_total(scaled, student)
        soft = soft * temperature**2
        agreed = share_favourites(student, taught)
    sums = torch.stack([part.sum() for part in (objective.mix(soft, hard), soft, hard, agreed)])
    if gradient is not None:
        gradient.copy_(_gradient(student, plain, taught, labels, alpha, temperature))
    return sums


def share_favourites(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """For each token 1 where no outcome is likelier to the student than the teacher's favourite, else 0."""
    # max is faster than argmax, and than comparing all
    favourite = teacher.max(-1, keepdim=True).indices
    return (student.gather(-1, favourite)[:, 0] == student.amax(-1)).float()


def _log_total(logits: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """The logarithm of the sum of exponentials, of which the largest probability tells."""
    return logits.amax(-1) - probabilities.amax(-1).log()


def _gradient(
    student: torch.Tensor,
    plain: torch.Tensor,
    taught: torch.Tensor | None,
    labels: torch.Tensor,
    alpha: float,
    temperature: float,
) -> torch.Tensor:
    """Of the loss of each token; what is given is overwritten."""
    if taught is None or alpha == 1:
        found = plain.mul_(alpha)
    elif student is plain:
        found = student.sub_(taught, alpha=1 - alpha)
    else:
        found = student.sub_(taught).mul_((1 - alpha) * temperature)
        if alpha:
            found.add_(plain, alpha=alpha)
    if alpha:
        found.scatter_add_(-1, labels[:, None], found.new_full((len(labels), 1), -alpha))
    return found
