"""Round to nearest: the absolute maximum, or the range, of a tensor, a row or a group decides the grid.

What backends that choose the numbers to round, rather than the grid, have in common.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..cache import check_choice, check_length, option, round_to_grid
from . import rounding
from .grid import Grid
from .grouped import GroupedLinear
from .options import WeightOptions


@dataclass(frozen=True, kw_only=True)
class RoundedOptions(WeightOptions):
    """How a weight is rounded."""

    nbits: int = option(4, "bits per code: 2, 3, 4 or 8")
    quant_type: str = option("int", "`int`: a uniform grid; `nf4`: 16 levels for normally distributed weights")
    granularity: str = option("group", "what shares a scale: `group` (of one row's inputs), `row` or `tensor`")
    group_size: int | None = option(None, "inputs per group; None is 128, and 64 for nf4. The last may be shorter")
    symmetric: bool = option(True, "zero is on the grid and only a scale is stored; False stores an offset too")

    def __post_init__(self) -> None:
        """Check the values and how they go together."""
        check_choice("nbits", self.nbits, (2, 3, 4, 8))
        check_choice("quant_type", self.quant_type, ("int", "nf4"))
        check_choice("granularity", self.granularity, ("group", "row", "tensor"))
        check_choice("symmetric", self.symmetric, (True, False))
        if self.quant_type == "nf4" and self.nbits != 4:
            raise ValueError(f"quant_type='nf4' has 4 bits, got nbits={self.nbits}")
        if self.quant_type == "nf4" and not self.symmetric:
            raise ValueError("symmetric=False needs a uniform grid: quant_type='nf4' has levels of its own")
        if self.group_size is not None:
            check_length("group_size", self.group_size, multiple=8, minimum=8)
            if self.granularity != "group":
                raise ValueError(
                    f"group_size={self.group_size} means nothing with granularity={self.granularity!r}: remove one"
                )

    def group(self, columns: int) -> int:
        """Inputs that share a scale, of a row with so many."""
        if self.granularity != "group":
            return columns
        default = 64 if self.quant_type == "nf4" else 128
        return min(self.group_size or default, columns)


class RoundedLinear(GroupedLinear):
    """Base class of the backends that round to nearest: 2, 3, 4 or 8 bits or nf4.

    Bits per weight: ``nbits + 16 / group_size`` symmetric and nf4, ``nbits + 32 / group_size`` affine.
    """

    Options = RoundedOptions
    options: RoundedOptions

    def make_grid(self) -> Grid:
        """The grid that the options stand for."""
        options = self.options
        return Grid(
            nbits=options.nbits,
            group=options.group(self.in_features),
            affine=not options.symmetric,
            levels=rounding.LEVELS if options.quant_type == "nf4" else None,
            numbers=torch.int8 if options.nbits == 8 and options.symmetric else None,
            per_tensor=options.granularity == "tensor",
        )

    def quantize(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Codes, scale and offset of each group."""
        nbits = self.options.nbits
        if self.options.quant_type == "nf4":
            return *rounding.normal(groups), None
        if self.options.symmetric:
            codes, scale = rounding.symmetric(groups, nbits)
            return codes.to(torch.int8) if nbits == 8 else codes.add_(2 ** (nbits - 1)).to(torch.uint8), scale, None
        low, high = groups.aminmax(dim=-1)
        return round_to_grid(groups, (high - low) / (2**nbits - 1), low, nbits)
