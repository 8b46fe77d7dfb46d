"""Round to nearest: the absolute maximum, or the range, of a tensor, a row or a group decides the grid."""

from __future__ import annotations

import torch

from hfkv.weights import QuantizedLinear

from . import grids
from .options import RtnOptions


class RtnLinear(QuantizedLinear):
    """A weight in 2, 3, 4 or 8 bits or in nf4, decoded by plain torch on any device.

    Stored: ``codes`` ``[out_features, row_bytes]`` uint8 (8 bits symmetric: ``[out_features, in_features]`` int8),
    ``scale`` and for affine grids ``offset`` ``[rows, groups]`` float16, one row for ``granularity="tensor"``. Bits per
    weight: ``nbits + 16 / group_size`` symmetric and nf4, ``nbits + 32 / group_size`` affine.
    """

    Options = RtnOptions
    backend = "rtn"
    options: RtnOptions
    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor

    @property
    def signed(self) -> bool:
        """Whether the codes are bytes with a sign, as torch's int8 products take them."""
        return self.options.nbits == 8 and self.options.symmetric

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.options.group(self.in_features)

    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what is stored."""
        groups = -(-self.in_features // self.group)
        scales = ((1 if self.options.granularity == "tensor" else self.out_features, groups), torch.float16)
        codes = grids.row_bytes(self.in_features, self.options.nbits), torch.uint8
        if self.signed:
            codes = self.in_features, torch.int8
        result = {"codes": ((self.out_features, codes[0]), codes[1]), "scale": scales}
        return result if self.options.symmetric else result | {"offset": scales}

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Codes, scale and offset."""
        nbits, rows = self.options.nbits, weight.float()
        missing = -self.in_features % self.group
        if missing:
            # repeat the last input: padding must not widen the last group's range
            rows = torch.cat([rows, rows[:, -1:].expand(-1, missing)], dim=1)
        groups = rows.unflatten(1, (-1, self.group))
        if self.options.granularity == "tensor":
            groups = groups.reshape(1, 1, -1)
        stored: dict[str, torch.Tensor] = {}
        if self.options.quant_type == "nf4":
            codes, stored["scale"] = grids.normal(groups)
        elif self.options.symmetric:
            codes, stored["scale"] = grids.symmetric(groups, nbits)
        else:
            codes, stored["scale"], stored["offset"] = grids.affine(groups, nbits)
        codes = codes.reshape(self.out_features, -1)[:, : self.in_features]
        stored["codes"] = codes.view(torch.int8) ^ -128 if self.signed else grids.to_bytes(codes, nbits)
        return stored

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, computed in float32 and rounded once."""
        return self.scaled(self.unpacked()).to(dtype)

    def unpacked(self) -> torch.Tensor:
        """``[out_features, in_features]`` float32: the weight in units of its group's scale."""
        if self.signed:
            return self.codes.float()
        codes = grids.from_bytes(self.codes, self.options.nbits, self.in_features)
        if self.options.quant_type == "nf4":
            return torch.tensor(grids.LEVELS, device=codes.device)[codes.int()]
        values = codes.float()
        return values.sub_(2 ** (self.options.nbits - 1)) if self.options.symmetric else values

    def scaled(self, values: torch.Tensor) -> torch.Tensor:
        """Multiply by the scales and add the offsets, in place."""
        whole = self.in_features // self.group * self.group
        parts = [(slice(0, whole), slice(0, whole // self.group))]
        if whole < self.in_features:
            # the last group is shorter
            parts.append((slice(whole, None), slice(-1, None)))
        for inputs, part in parts:
            groups = values[:, inputs].unflatten(1, (self.scale[:, part].shape[1], -1))
            groups.mul_(self.scale[:, part, None].float())
            if not self.options.symmetric:
                groups.add_(self.offset[:, part, None].float())
        return values
