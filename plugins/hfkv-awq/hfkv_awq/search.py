"""The scales and the ranges that lower the error of the output on a text.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2023: a weight column that
meets large inputs is multiplied before rounding, and its input divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .calibration import Moments

# exponents of the input's magnitude that are tried
EXPONENTS = tuple(index / 20 for index in range(20))
# shares of a group's largest magnitude that are tried
SHARES = tuple(1 - index / 20 for index in range(11))

Round = Callable[[torch.Tensor], torch.Tensor]


def output_error(difference: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """``[rows]``: squared error of each output over the text, for errors ``[rows, inputs]`` of the weight."""
    return ((difference @ gram) * difference).sum(-1)


def best_scale(
    weights: Sequence[torch.Tensor],
    rounds: Sequence[Round],
    moments: Moments,
    shared: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """``[inputs]``: what to multiply the columns of weights by that share an input.

    Parameters
    ----------
    weights
        ``[outputs, inputs]`` float32 each.
    rounds
        For each weight, what rounds it.
    shared
        Makes equal what cannot be divided apart.
    """
    magnitude = shared(moments.magnitude).clamp_min(moments.magnitude.max() * 1e-5 + 1e-20)
    best, least = torch.ones_like(magnitude), torch.inf
    for exponent in EXPONENTS:
        scale = magnitude**exponent
        scale /= (scale.max() * scale.min()).sqrt()
        error = 0.0
        for weight, rounded in zip(weights, rounds, strict=True):
            difference = rounded(weight * scale) / scale - weight
            error += output_error(difference, moments.gram).sum().item()
        if error < least:
            best, least = scale, error
    return best


def best_share(weight: torch.Tensor, rounded: Round, gram: torch.Tensor, group: int) -> torch.Tensor:
    """``[outputs, groups]``: how much of its largest magnitude each group of a weight should keep.

    A group's error is taken by itself, as if the others had none.
    """
    # the last group may be shorter
    missing = -weight.shape[1] % group
    padded = torch.nn.functional.pad(gram, (0, missing, 0, missing))
    blocks = padded.unflatten(0, (-1, group)).unflatten(2, (-1, group)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    best = weight.new_ones(weight.shape[0], len(blocks))
    least = torch.full_like(best, torch.inf)
    for share in SHARES:
        tried = torch.full_like(best, share)
        difference = _grouped(rounded(clipped(weight, tried, group)) - weight, group).transpose(0, 1)
        error = ((difference @ blocks) * difference).sum(-1).T
        best, least = torch.where(error < least, tried, best), torch.minimum(error, least)
    return best


def clipped(weight: torch.Tensor, share: torch.Tensor, group: int) -> torch.Tensor:
    """A weight whose groups stay within their share ``[outputs, groups]`` of their largest magnitude."""
    limit = share * _grouped(weight.abs(), group).amax(-1)
    limits = limit.repeat_interleave(group, dim=1)[:, : weight.shape[1]]
    return weight.clamp(-limits, limits)


def _grouped(matrix: torch.Tensor, group: int) -> torch.Tensor:
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % group)).unflatten(1, (-1, group))
