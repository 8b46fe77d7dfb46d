"""How a weight lies on a grid, and the tensors that it is stored in: what kernels are given."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SCALE_DTYPE = torch.float16


@dataclass(frozen=True)
class Grid:
    """How a weight ``[outputs, inputs]`` is stored.

    Parameters
    ----------
    nbits
        Bits of a code: 1, 2, 3, 4 or 8.
    group
        Inputs that share a scale; the last group of a row may be shorter.
    affine
        Whether there is an offset. Without one, a code counts from the middle ``2 ** (nbits - 1)``.
    levels
        A codebook that the codes index, or None.
    numbers
        int8 or float8: the codes are numbers of that dtype, not bit patterns. None otherwise.
    per_tensor
        Whether the whole tensor is one group.
    """

    nbits: int
    group: int
    affine: bool = False
    levels: tuple[float, ...] | None = None
    numbers: torch.dtype | None = None
    per_tensor: bool = False


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight ``[outputs, inputs]`` on a grid.

    Parameters
    ----------
    grid
        How it is stored.
    inputs
        Columns of the weight.
    codes
        ``[outputs, inputs]`` of the grid's ``numbers``, or ``[outputs, row_bytes]`` uint8: the codes of a row, padded
        to a multiple of 8 of them, as `PackedBlocks` has those of a group.
    scale, offset
        ``[outputs, groups]`` float16, or ``[1, 1]`` where the whole tensor is one group; no offset where the grid is
        not affine.
    """

    grid: Grid
    inputs: int
    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None = None

    @property
    def outputs(self) -> int:
        """Rows of the weight."""
        return self.codes.shape[0]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.inputs if self.grid.per_tensor else min(self.grid.group, self.inputs)
