"""Weights on a grid, in groups that share a scale: the storage and the products that many backends have in common.

A number is ``code * scale + offset``, where the code may be shifted (a symmetric grid), looked up (a codebook) or a
number by itself (int8, float8). A backend only decides codes, scale and offset.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch

from .. import kernels
from ..kernels.reference import numbers_of, pack_codes, scaled, unpack_codes
from . import products
from .grid import SCALE_DTYPE, Grid, PackedWeight
from .linear import Layout, QuantizedLinear


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
    _packed_weight: PackedWeight | None = None

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
        return scaled(numbers_of(codes, self.grid), self._span, scale, offset)

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
        if torch.compiler.is_compiling():
            return kernels.REFERENCE.dequantize(self.packed(), dtype)
        return kernels.dequantize(self.packed(), dtype)

    def packed(self) -> PackedWeight:
        """The stored tensors, for kernels; made once, until one of them is another."""
        codes, scale = self._buffers["codes"], self._buffers["scale"]
        made = self._packed_weight
        if made is None or made.codes is not codes or made.scale is not scale:
            offset = self.offset if self.grid.affine else None
            made = PackedWeight(self.grid, self.in_features, self._codes(), self.scale, offset)
            self._packed_weight = made
        return made

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

    def _kernels(self, dtype: torch.dtype) -> kernels.Kernels | None:
        """The kernels whose product computes in a dtype; None where it would be the reference's."""
        request = self._requests.get(dtype)
        if request is None:
            request = kernels.Request("matmul", self.codes.device.type, dtype, grid=self.grid)
            self._requests[dtype] = request
        found = kernels.select(request)
        return None if found is kernels.REFERENCE else found

    @functools.cached_property
    def _requests(self) -> dict[torch.dtype, kernels.Request]:
        return {}

    def fast(self, states: torch.Tensor) -> bool:
        """Where kernels have a product with such codes; few rows in bfloat16 on a CPU for which torch has one."""
        # a compiler sees through plain torch only
        if torch.compiler.is_compiling():
            return False
        return self._kernels(states.dtype) is not None or self._torch_has_product(states)

    def _torch_has_product(self, states: torch.Tensor) -> bool:
        limit = {"int8": products.INT8_ROWS, "int4": products.INT4_ROWS, None: 0}[self._product]
        return states.shape[0] <= limit and states.dtype == products.DTYPE and self.codes.device.type == "cpu"

    def matmul(self, states: torch.Tensor) -> torch.Tensor:
        """The product of the kernels, or of torch's."""
        found = self._kernels(states.dtype)
        if found is not None:
            return found.matmul(states, self.packed())
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
        """Which product computes."""
        decoded = "decoded for each call"
        found = {dtype: self._kernels(dtype) for dtype in (torch.float32, torch.bfloat16)}
        names = dict.fromkeys(item.name for item in found.values() if item is not None)
        if names:
            return " and ".join(f"the product of the kernels {name!r}" for name in names)
        if self.codes.device.type != "cpu":
            return decoded
        if self._product is None:
            return f"{decoded}, slowly: torch has no CPU product for these codes or this shape; hfkv-cpu has one"
        limit = products.INT8_ROWS if self._product == "int8" else products.INT4_ROWS
        return f"torch's {self._product} product up to {limit} rows of bfloat16, otherwise {decoded}"

    # the codes are saved, moved and copied in one order

    def settle(self) -> None:
        """Put the codes into the order in which they are saved, and forget what is made from what is stored."""
        if self.codes.dim() == 3:
            self.codes = self._codes()
        self._packed_weight = None
        self._requests.clear()
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
