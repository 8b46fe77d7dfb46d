"""The grids that a group of weights is rounded to, and the codes as bytes.

A group's numbers are ``(code - middle) * scale`` (symmetric), ``code * scale + offset`` (affine) or
``LEVELS[code] * scale`` (nf4). Scale and offset are float16, chosen before the codes, so that a code is the nearest
on the grid as it is stored.
"""

from __future__ import annotations

from statistics import NormalDist

import torch

from hfkv.cache import round_to_grid
from hfkv.kernels.reference import pack_codes, unpack_codes

# the least float16 above zero, and the largest: a scale is never 0 or infinite
_SMALLEST, _LARGEST = 2.0**-24, 65504.0


def _normal_levels() -> tuple[float, ...]:
    """The 16 levels of nf4: eight slices of the normal distribution below zero and nine above share the zero.

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
    """Codes ``[..., group]`` uint8 and scale ``[...]``: the largest magnitude is the last code."""
    middle = 2 ** (nbits - 1)
    scale = _as_scale(groups.abs().amax(dim=-1) / (middle - 1))
    codes = groups.div(scale.float().unsqueeze(-1)).round_().clamp_(1 - middle, middle - 1)
    return codes.add_(middle).to(torch.uint8), scale


def affine(groups: torch.Tensor, nbits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scale and offset: the grid spans the least and the largest number."""
    low, high = groups.aminmax(dim=-1)
    return round_to_grid(groups, (high - low) / (2**nbits - 1), low, nbits)


def normal(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of nf4 and the scale: the largest magnitude is a level of 1."""
    scale = _as_scale(groups.abs().amax(dim=-1))
    levels = torch.tensor(LEVELS, device=groups.device)
    edges = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(groups / scale.float().unsqueeze(-1), edges).to(torch.uint8), scale


def _as_scale(scale: torch.Tensor) -> torch.Tensor:
    return scale.clamp(_SMALLEST, _LARGEST).half()


def to_bytes(codes: torch.Tensor, nbits: int) -> torch.Tensor:
    """``[rows, columns]`` to ``[rows, row_bytes]``."""
    missing = -codes.shape[-1] % 8
    return pack_codes(torch.nn.functional.pad(codes, (0, missing)) if missing else codes, nbits)


def from_bytes(packed: torch.Tensor, nbits: int, columns: int) -> torch.Tensor:
    """The inverse of `to_bytes`."""
    return unpack_codes(packed, nbits)[:, :columns]


def row_bytes(columns: int, nbits: int) -> int:
    """Bytes of one row's codes."""
    return (columns + -columns % 8) * nbits // 8
