"""Weights on a grid, in groups that share a scale: the storage and the products that many backends have in common.

A number is ``code * scale + offset``, where the code may be shifted (a symmetric grid), looked up (a codebook) or a
number by itself (int8, float8). A backend only decides codes, scale and offset.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

from ..kernels.reference import pack_codes, unpack_codes
from . import products
from .linear import Layout, QuantizedLinear

SCALE_DTYPE = torch.float16
# elements that are decoded at a time: what is in between stays in the processor's cache
CHUNK_ELEMENTS = 2**18


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


class GroupedLinear(QuantizedLinear):
    """Base class of the backends whose weights lie on a grid.

    Stored: ``codes`` ``[out_features, row_bytes]`` uint8 or ``[out_features, in_features]`` of the grid's ``numbers``;
    ``scale`` and for affine grids ``offset`` ``[rows, groups]`` float16, where a whole tensor has one row. On a CPU
    that has a 4-bit product, uniform codes of 4 bits and fewer lie in its tiles once it was used, in 4 bits each; they
    are saved as they were.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor

    @abstractmethod
    def make_grid(self) -> Grid:
        """The grid that the options stand for."""

    @abstractmethod
    def quantize(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Codes, scale and offset of groups.

        Parameters
        ----------
        groups
            ``[..., group]`` float32.

        Returns
        -------
        tuple
            Codes ``[..., group]`` (uint8, or the grid's ``numbers``), scale and offset ``[...]`` float16; no offset
            where the grid has none.
        """

    @functools.cached_property
    def grid(self) -> Grid:
        """The grid of this layer."""
        return self.make_grid()

    @property
    def _row_bytes(self) -> int:
        return (self.in_features + -self.in_features % 8) * self.grid.nbits // 8

    def layout(self) -> Layout:
        """Shape and dtype of what is stored."""
        grid = self.grid
        codes: tuple[tuple[int, ...], torch.dtype] = ((self.out_features, self._row_bytes), torch.uint8)
        if grid.numbers is not None:
            codes = ((self.out_features, self.in_features), grid.numbers)
        scales = ((1, 1) if grid.per_tensor else (self.out_features, -(-self.in_features // grid.group)), SCALE_DTYPE)
        result = {"codes": codes, "scale": scales}
        return result | {"offset": scales} if grid.affine else result

    def encode(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Codes, scale and offset."""
        codes, scale, offset = self._quantized(weight)
        if self.grid.numbers is None:
            codes = self._packed(codes)
        return {"codes": codes, "scale": scale} | ({} if offset is None else {"offset": offset})

    def approximate(self, weight: torch.Tensor) -> torch.Tensor:
        """``[out_features, in_features]`` float32: what `decode` would give for a weight; nothing is stored."""
        codes, scale, offset = self._quantized(weight)
        return self._scaled(self._numbers(codes), scale, offset)

    def _quantized(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Codes ``[out_features, in_features]``, one a byte, with scale and offset."""
        rows, group = weight.float(), self.grid.group
        missing = -self.in_features % group
        if missing and not self.grid.per_tensor:
            # repeat the last input: padding must not widen the last group's range
            rows = torch.cat([rows, rows[:, -1:].expand(-1, missing)], dim=1)
        groups = rows.reshape(1, 1, -1) if self.grid.per_tensor else rows.unflatten(1, (-1, group))
        codes, scale, offset = self.quantize(groups)
        return codes.reshape(self.out_features, -1)[:, : self.in_features].contiguous(), scale, offset

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, computed in float32 and rounded once."""
        result = torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.codes.device)
        codes = self._codes()
        step = max(1, CHUNK_ELEMENTS // self.in_features)
        for start in range(0, self.out_features, step):
            rows = slice(start, start + step)
            # a whole tensor has one row of scales
            scale, *offset = (part if self.grid.per_tensor else part[rows] for part in self._scale_and_offset())
            result[rows] = self._scaled(self._values(codes[rows]), scale, offset[0] if offset else None)
        return result

    def _codes(self) -> torch.Tensor:
        """The codes as they are saved."""
        if self.codes.dim() == 2:
            return self.codes
        return self._packed(products.from_tiles(self.codes) - self._shift)

    def _packed(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes ``[outputs, inputs]``, one a byte, as they are saved."""
        return pack_codes(torch.nn.functional.pad(codes, (0, -self.in_features % 8)), self.grid.nbits)

    def _unpacked(self, codes: torch.Tensor) -> torch.Tensor:
        """The inverse of `_packed`."""
        return unpack_codes(codes, self.grid.nbits)[:, : self.in_features]

    def _values(self, codes: torch.Tensor) -> torch.Tensor:
        """``[rows, in_features]`` float32 in units of the scale, of codes as they are stored."""
        if self.grid.numbers is None:
            codes = self._unpacked(codes)
        return self._numbers(codes)

    def _numbers(self, codes: torch.Tensor) -> torch.Tensor:
        """``[rows, in_features]`` float32 in units of the scale, of codes that are one a byte."""
        grid = self.grid
        if grid.levels is not None:
            return torch.tensor(grid.levels, device=codes.device)[codes.int()]
        values = codes.float()
        return values if grid.affine or grid.numbers is not None else values.sub_(2 ** (grid.nbits - 1))

    def _scaled(self, values: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
        """Multiply by the scales and add the offsets, in place."""
        group = self.in_features if self.grid.per_tensor else self.grid.group
        whole = self.in_features // group
        parts = [(slice(0, whole * group), slice(0, whole))]
        if whole * group < self.in_features:
            # the last group is shorter
            parts.append((slice(whole * group, None), slice(-1, None)))
        for inputs, part in parts:
            factor = scale[:, part, None].float()
            groups = values[:, inputs].unflatten(1, (factor.shape[1], -1)).mul_(factor)
            if offset is not None:
                groups.add_(offset[:, part, None].float())
        return values

    # the products

    @functools.cached_property
    def _product(self) -> str | None:
        """The product of torch's that fits this layer."""
        grid = self.grid
        if grid.numbers is torch.int8 and (grid.per_tensor or grid.group >= self.in_features) and not grid.affine:
            return "int8"
        # fewer bits than 4 take more room in the product's tiles, and are a tenth as fast without it
        uniform = grid.nbits <= 4 and grid.levels is None and grid.numbers is None
        size = products.int4_group(self._span, self.in_features)
        if uniform and size and self.out_features % products.TILE == 0 and products.has_int4():
            return "int4"
        return None

    @property
    def _shift(self) -> int:
        """What is added to codes in the product's tiles, so that the middle of the grid is the product's."""
        return 8 - 2 ** (self.grid.nbits - 1)

    @property
    def _span(self) -> int:
        return self.in_features if self.grid.per_tensor else min(self.grid.group, self.in_features)

    def fast(self, states: torch.Tensor) -> bool:
        """Few rows in bfloat16 on a CPU, for which torch has a product with such codes."""
        limit = {"int8": products.INT8_ROWS, "int4": products.INT4_ROWS, None: 0}[self._product]
        return states.shape[0] <= limit and states.dtype == products.DTYPE and self.codes.device.type == "cpu"

    def matmul(self, states: torch.Tensor) -> torch.Tensor:
        """The product of torch's."""
        # kept, so that it is copied once
        self.codes = products.aligned(self.codes)
        if self._product == "int8":
            return products.int8(states, self.codes, self._scales(self._int8_scales))
        if self.codes.dim() == 2:
            self.codes = products.tiles(self._unpacked(self.codes) + self._shift)
        return products.int4(states, self.codes, self._scales(self._int4_scales))

    def _int8_scales(self) -> torch.Tensor:
        return self.scale.flatten().expand(self.out_features).to(products.DTYPE)

    def _int4_scales(self) -> torch.Tensor:
        scale, *offset = (part.float().expand(self.out_features, -1) for part in self._scale_and_offset())
        # a symmetric grid counts from its middle
        middle = offset[0] + 2 ** (self.grid.nbits - 1) * scale if offset else torch.zeros_like(scale)
        return products.int4_scales(scale, middle, self._span, self.in_features)

    def _scale_and_offset(self) -> list[torch.Tensor]:
        return [self.scale, self.offset] if self.grid.affine else [self.scale]

    def _scales(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The scales as the product wants them, made once: a buffer, so that its bytes are counted; it is not saved."""
        made = self._buffers.get("product_scales")
        if made is None:
            made = make()
            self.register_buffer("product_scales", made, persistent=False)
        return made

    def path(self) -> str:
        """Which product computes few rows."""
        decoded = "decoded for each call"
        if self.codes.device.type != "cpu":
            return decoded
        if self._product is None:
            return f"{decoded}, slowly: torch has no CPU product for these codes or this shape"
        limit = products.INT8_ROWS if self._product == "int8" else products.INT4_ROWS
        return f"torch's {self._product} product up to {limit} rows of bfloat16, otherwise {decoded}"

    # the codes are saved, moved and copied in one order

    def settle(self) -> None:
        """Put the codes into the order in which they are saved, and forget what is made from the scales."""
        if self.codes.dim() == 3:
            self.codes = self._codes()
        self._buffers.pop("product_scales", None)
        self._non_persistent_buffers_set.discard("product_scales")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}codes"] = self._codes() if keep_vars else self._codes().detach()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.settle()
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self.settle()
        return super()._apply(fn, recurse)
