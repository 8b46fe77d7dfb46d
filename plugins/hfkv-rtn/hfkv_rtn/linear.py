"""Round to nearest: the absolute maximum, or the range, of a tensor, a row or a group decides the grid."""

from __future__ import annotations

import torch

from hfkv.cache import round_to_grid
from hfkv.weights import Grid, GroupedLinear

from . import grids
from .options import RtnOptions


class RtnLinear(GroupedLinear):
    """A weight in 2, 3, 4 or 8 bits or in nf4.

    Bits per weight: ``nbits + 16 / group_size`` symmetric and nf4, ``nbits + 32 / group_size`` affine.
    """

    Options = RtnOptions
    backend = "rtn"
    options: RtnOptions

    def make_grid(self) -> Grid:
        """The grid that the options stand for."""
        options = self.options
        return Grid(
            nbits=options.nbits,
            group=options.group(self.in_features),
            affine=not options.symmetric,
            levels=grids.LEVELS if options.quant_type == "nf4" else None,
            numbers=torch.int8 if options.nbits == 8 and options.symmetric else None,
            per_tensor=options.granularity == "tensor",
        )

    def quantize(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Codes, scale and offset of each group."""
        nbits = self.options.nbits
        if self.options.quant_type == "nf4":
            return *grids.normal(groups), None
        if self.options.symmetric:
            codes, scale = grids.symmetric(groups, nbits)
            return codes.to(torch.int8) if nbits == 8 else codes.add_(2 ** (nbits - 1)).to(torch.uint8), scale, None
        low, high = groups.aminmax(dim=-1)
        return round_to_grid(groups, (high - low) / (2**nbits - 1), low, nbits)
