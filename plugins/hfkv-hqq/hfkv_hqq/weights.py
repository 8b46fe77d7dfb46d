"""HQQ decides the codes of quantized weights.

Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023: the scale spans a group's range,
and a solver moves the zero point so that a few large errors count less than many small ones. No data is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hqq.core.quantize import Quantizer  # type: ignore[import-untyped]

from hfkv.cache import check_choice, check_length, option, round_to_grid
from hfkv.weights import Grid, GroupedLinear, WeightOptions


@dataclass(frozen=True, kw_only=True)
class HqqOptions(WeightOptions):
    """How HQQ quantizes a weight."""

    nbits: int = option(4, "bits per code: 1, 2, 3, 4 or 8")
    group_size: int = option(64, "inputs per group; the last group of a row may be shorter")

    def __post_init__(self) -> None:
        """Check the values."""
        check_choice("nbits", self.nbits, (1, 2, 3, 4, 8))
        check_length("group_size", self.group_size, multiple=8, minimum=8)


class HqqLinear(GroupedLinear):
    """A weight whose zero points HQQ's solver moved, for as long as the mean error of the layer falls.

    Scale and offset are rounded to float16 before the codes are chosen. Bits per weight: ``nbits + 32 / group_size``.
    """

    Options = HqqOptions
    backend = "hqq"
    options: HqqOptions

    def make_grid(self) -> Grid:
        """The grid that the options stand for."""
        group = min(self.options.group_size, self.in_features)
        return Grid(nbits=self.options.nbits, group=group, affine=True)

    def quantize(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Codes, scale and offset of each group."""
        rows = groups.flatten(0, -2)
        _, solved = Quantizer.quantize(
            rows,
            nbits=self.options.nbits,
            group_size=groups.shape[-1],
            axis=1,
            bitpack=False,
            device=str(rows.device),
        )
        scale = solved["scale"].view(groups.shape[:-1])
        offset = -solved["zero"].view(groups.shape[:-1]) * scale
        return round_to_grid(groups, scale, offset, self.options.nbits)
