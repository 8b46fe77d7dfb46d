"""What a KV quantizer is: the rule that decides codes, scale and offset of a group."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from .packed import SCALE_DTYPE

_LARGEST = torch.finfo(SCALE_DTYPE).max
# the smallest float16 above zero: a constant channel has no range, and its scale must not become 0
_SMALLEST = 2.0**-24


class KVQuantizer(ABC):
    """Base class of the rules that ``backend`` names.

    A quantizer is built once per layer as ``Class()``; it holds no tensors and can be pickled.
    """

    name: str

    def codebook(self, nbits: int) -> tuple[float, ...] | None:
        """The ``2**nbits`` levels of a non-uniform grid; None for the uniform one."""
        return None

    @abstractmethod
    def quantize(self, groups: torch.Tensor, nbits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, scale and offset such that ``levels[codes] * scale + offset`` is near the groups.

        Parameters
        ----------
        groups
            ``[..., group]`` float32; each last-dimension run shares one scale and one offset.

        Returns
        -------
        tuple
            Codes ``[..., group]`` uint8, scale and offset ``[...]`` float16.
        """


def round_to_grid(
    groups: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, nbits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The nearest codes of a uniform grid, chosen with the scale and offset as they will be stored.

    Parameters
    ----------
    groups
        ``[..., group]`` float32.
    scale, offset
        ``[...]`` in any floating dtype; rounded to float16, kept finite and the scale above zero.

    Returns
    -------
    tuple
        What `KVQuantizer.quantize` returns.
    """
    scale = scale.clamp(_SMALLEST, _LARGEST).to(SCALE_DTYPE)
    offset = offset.clamp(-_LARGEST, _LARGEST).to(SCALE_DTYPE)
    codes = groups.sub(offset.float().unsqueeze(-1)).div_(scale.float().unsqueeze(-1)).round_()
    return codes.clamp_(0, 2**nbits - 1).to(torch.uint8), scale, offset
