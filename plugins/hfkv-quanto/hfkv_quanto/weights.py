"""optimum-quanto decides the codes of quantized weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from optimum.quanto import (  # type: ignore[import-untyped]
    AbsmaxOptimizer,
    MaxOptimizer,
    qfloat8,
    qint2,
    qint4,
    qint8,
    quantize_weight,
)

from hfkv.cache import check_choice, check_length, option, round_to_grid
from hfkv.weights import Grid, GroupedLinear, WeightOptions

QTYPES = {("int", 8): qint8, ("int", 4): qint4, ("int", 2): qint2, ("float8", 8): qfloat8}


@dataclass(frozen=True, kw_only=True)
class QuantoOptions(WeightOptions):
    """How optimum-quanto quantizes a weight."""

    nbits: int = option(8, "bits per code: 2, 4 or 8")
    quant_type: str = option("int", "`int`, or `float8` (8 bits, e4m3)")
    group_size: int | None = option(None, "inputs per group, below 8 bits; None is 128. 8 bits have one scale per row")

    def __post_init__(self) -> None:
        """Check the values and how they go together."""
        check_choice("nbits", self.nbits, (2, 4, 8))
        check_choice("quant_type", self.quant_type, ("int", "float8"))
        if (self.quant_type, self.nbits) not in QTYPES:
            raise ValueError(f"quant_type='float8' has 8 bits, got nbits={self.nbits}")
        if self.group_size is not None:
            check_length("group_size", self.group_size, multiple=8, minimum=8)
            if self.nbits == 8:
                raise ValueError(f"group_size={self.group_size} means nothing with nbits=8: a row has one scale")


class QuantoLinear(GroupedLinear):
    """A weight as quanto quantizes it: a symmetric scale per row for int8 and float8, an affine grid per group below.

    quanto's own layers compile a C++ extension when they first unpack int4 or int2 on a CPU; here its quantization
    runs, and hfkv's storage and products. Bits per weight: 8 and a float16 per row, or ``nbits + 32 / group_size``.
    """

    Options = QuantoOptions
    backend = "quanto"
    options: QuantoOptions

    def make_grid(self) -> Grid:
        """The grid that the options stand for."""
        if self.options.nbits == 8:
            numbers = torch.int8 if self.options.quant_type == "int" else torch.float8_e4m3fn
            return Grid(nbits=8, group=self.in_features, numbers=numbers)
        return Grid(nbits=self.options.nbits, group=min(self.options.group_size or 128, self.in_features), affine=True)

    def quantize(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Codes, scale and offset of each group."""
        qtype = QTYPES[self.options.quant_type, self.options.nbits]
        rows = groups.flatten(0, -2)
        if self.options.nbits == 8:
            # the scale as it will be stored, before the codes are chosen
            scale = AbsmaxOptimizer()(rows, qtype, 0).half().clamp_min(2.0**-24)
            data = quantize_weight(rows, qtype=qtype, axis=0, scale=scale.float(), optimized=False)._data
            return data.view(groups.shape), scale.view(groups.shape[:-1]), None
        scale, shift = MaxOptimizer()(rows, qtype, 0, rows.shape[-1])
        shape = groups.shape[:-1]
        return round_to_grid(groups, scale.view(shape), -shift.view(shape), self.options.nbits)
