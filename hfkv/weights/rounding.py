"""The grids that a group of weights is rounded to.

Scale and offset are float16, chosen before the codes, so that a code is the nearest on the grid as it is stored.
"""

from __future__ import annotations

from statistics import NormalDist

import torch

# the least float16 above zero, and the largest: a scale is never 0 or infinite
_SMALLEST, _LARGEST = 2.0**-24, 65504.0


def _normal_levels() -> tuple[float, ...]:
    """The 16 levels of nf4: seven slices of the normal distribution below zero and eight above share the zero.

    Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023. The outermost slice is taken so that its
    middle is as far out for 15 as for 16 levels.
    """
    last = (1 - 1 / 30 + 1 - 1 / 32) / 2

    def half(count: int) -> list[float]:
        step = (last - 0.5) / count
        return [NormalDist().inv_cdf(last - step * index) for index in range(count)]

    levels = sorted([*half(8), 0.0, *(-level for level in half(7))])
    return tuple(level / levels[-1] for level in levels)


LEVELS = _normal_levels()


def symmetric(groups: torch.Tensor, nbits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[..., group]`` float32 from ``1 - middle`` to ``middle - 1``, and scale ``[...]``."""
    most = 2 ** (nbits - 1) - 1
    scale = _as_scale(groups.abs().amax(dim=-1) / most)
    return groups.div(scale.float().unsqueeze(-1)).round_().clamp_(-most, most), scale


def normal(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of nf4 uint8 and the scale: the largest magnitude is a level of 1."""
    scale = _as_scale(groups.abs().amax(dim=-1))
    levels = torch.tensor(LEVELS, device=groups.device)
    edges = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(groups / scale.float().unsqueeze(-1), edges).to(torch.uint8), scale


def _as_scale(scale: torch.Tensor) -> torch.Tensor:
    return scale.clamp(_SMALLEST, _LARGEST).half()
