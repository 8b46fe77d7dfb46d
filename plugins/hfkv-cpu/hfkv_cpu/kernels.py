"""The op table's entry for the CPU: checks, pointers and strides; the work is done in ``src/``."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from hfkv.cache import ExactBuffers, KVQuantizer, KVView, PackedBlocks, PackedFormat
from hfkv.cache.packed import UPPER_HALVES
from hfkv.kernels import Request
from hfkv.weights import Grid, PackedWeight

from . import _kernels

# the numbers of `hfkv::Type`
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.bool: 3}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# the numbers of `hfkv::Code`, which for fewer than 8 bits are those bits
NUMBERS = {torch.int8: 9, torch.float8_e4m3fn: 10}
# from so many rows on it is faster to decode the weight and to use torch's product
DENSE_ROWS = {torch.float32: 48, torch.bfloat16: 14, torch.float16: 14}


class CpuKernels:
    """Kernels of one instruction set.

    Parameters
    ----------
    isa
        ``"avx512_amx"``, ``"avx512_vnni"``, ``"avx512"``, ``"avx2"`` or ``"portable"``; None is the best that this
        processor has.

    Raises
    ------
    ValueError
        The processor does not have it, or there is no such name.
    """

    name = "cpu"

    def __init__(self, isa: str | None = None) -> None:
        names = _kernels.isa_names()
        if isa is not None and isa not in names:
            raise ValueError(f"HFKV_CPU_ISA={isa!r} is not one of this processor's: {', '.join(names)}")
        self.isa = isa or names[0]
        self._index = names.index(self.isa)

    def supports(self, request: Request) -> tuple[bool, str]:
        """Any format and shape on the CPU; packing by round to nearest only."""
        if request.device != "cpu":
            return False, f"runs on the CPU, not on {request.device}"
        if request.dtype not in FLOATS:
            return False, f"{request.dtype} is not one of float32, bfloat16, float16"
        if request.grid is not None:
            return self._supports_grid(request.grid)
        if len({format.block_length for format in request.formats}) > 1:
            return False, "keys and values are in blocks of different lengths"
        if request.op == "pack":
            if request.quantizer != "rtn":
                return False, f"packs with backend 'rtn' only; {request.quantizer!r} decides its codes in torch"
            if request.formats[0].codebook is not None:
                return False, "packs uniform grids only, not codebooks"
        return True, self._reason

    @property
    def _reason(self) -> str:
        return f"{self.isa}, threads: {_kernels.threads_from()}"

    def _supports_grid(self, grid: Grid) -> tuple[bool, str]:
        if grid.numbers is not None and grid.numbers not in NUMBERS:
            return False, f"multiplies with int8 and float8_e4m3fn, not with {grid.numbers}"
        if grid.nbits == 8 and grid.levels is not None:
            return False, "looks up to 16 levels up, not the 256 of a codebook of 8 bits"
        return True, self._reason

    def pack(self, states: torch.Tensor, format: PackedFormat, quantizer: KVQuantizer) -> PackedBlocks:
        """Quantize whole blocks, to the bit as `ReferenceKernels.pack`."""
        batch, heads, tokens, _ = states.shape
        blocks = PackedBlocks.empty(format, batch, heads, tokens // format.block_length)
        states = _rows(states)
        _kernels.pack(self._index, torch.get_num_threads(), _tensor(states), _record(blocks), batch, heads)
        return blocks

    def unpack(self, blocks: PackedBlocks, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize blocks (`ReferenceKernels.unpack`)."""
        batch, heads = blocks.codes.shape[:2]
        states = torch.empty(batch, heads, blocks.length, blocks.format.head_dim, dtype=dtype)
        _kernels.unpack(self._index, torch.get_num_threads(), _tensor(states), _record(blocks), batch, heads)
        return states

    def attend(
        self, query: torch.Tensor, view: KVView, mask: torch.Tensor | None, scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over packed and exact segments (`ReferenceKernels.attend`)."""
        sizes, strides = query.shape, query.stride()
        if strides[3] != 1:
            query = query.contiguous()
            strides = query.stride()
        batch, heads, queries, _ = sizes
        keys, values = view.keys, view.values
        # as the caller wants it in the end: [batch, queries, heads, channels] is contiguous
        output = torch.empty((batch, queries, heads, values.format.head_dim), dtype=query.dtype)
        lse = torch.empty((batch, heads, queries), dtype=torch.float32)
        if mask is not None:
            mask = _rows(mask if mask.dtype in TYPES else mask.float()).expand(batch, heads, -1, -1)
        exact, _owners = _exact(view.exact)
        _kernels.attend(
            self._index,
            torch.get_num_threads(),
            query.data_ptr(),
            TYPES[query.dtype],
            sizes,
            strides,
            exact,
            view.exact_length,
            view.sink,
            _record(keys),
            _record(values),
            keys.codes.shape[1],
            None if mask is None else _tensor(mask),
            output.data_ptr(),
            lse.data_ptr(),
            scale,
            causal,
        )
        return output.transpose(1, 2), lse

    def dequantize(self, weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize a weight, to the bit as `ReferenceKernels.dequantize`."""
        result = torch.empty(weight.outputs, weight.inputs, dtype=dtype)
        self._matmul(weight, 0, (0, 0), result)
        return result

    def matmul(self, states: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """Product with a packed weight, summed in float32 (`ReferenceKernels.matmul`)."""
        rows = states.shape[0]
        if rows >= DENSE_ROWS[states.dtype]:
            return torch.nn.functional.linear(states, self.dequantize(weight, states.dtype))
        result = states.new_empty(rows, weight.outputs)
        if rows:
            states = _rows(states)
            self._matmul(weight, rows, (states.data_ptr(), states.stride(0)), result)
        return result

    def _matmul(self, weight: PackedWeight, rows: int, states: tuple[int, int], result: torch.Tensor) -> None:
        codes, scale, offset = weight.codes, weight.scale, weight.offset
        if not (codes.is_contiguous() and scale.is_contiguous() and (offset is None or offset.is_contiguous())):
            codes, scale = codes.contiguous(), scale.contiguous()
            offset = None if offset is None else offset.contiguous()
        _kernels.matmul(
            self._index,
            torch.get_num_threads(),
            _grid(weight.grid),
            codes.data_ptr(),
            scale.data_ptr(),
            0 if offset is None else offset.data_ptr(),
            weight.grid.per_tensor,
            weight.group,
            codes.stride(0),
            rows,
            weight.inputs,
            weight.outputs,
            *states,
            result.data_ptr(),
            result.stride(0),
            TYPES[result.dtype],
        )


def _rows(states: torch.Tensor) -> torch.Tensor:
    """The same numbers, those of a row next to each other."""
    return states if states.stride(-1) == 1 else states.contiguous()


def _tensor(states: torch.Tensor) -> tuple[int, int, int, int, int]:
    batch, head, row, _ = states.stride()
    return states.data_ptr(), TYPES[states.dtype], batch, head, row


def _whole_groups(blocks: PackedBlocks) -> PackedBlocks:
    """The same blocks, each of them contiguous: stores make them so, and views of stores keep it."""
    codes, scale, offset = blocks.codes, blocks.scale, blocks.offset
    within = (blocks.format.group_bytes // blocks.format.planes, 1)
    if codes.stride()[3:] == within and scale.stride(3) == 1 and scale.stride() == offset.stride():
        return blocks
    return blocks.map(torch.Tensor.contiguous)


def _record(blocks: PackedBlocks) -> Any:
    """Blocks as the module reads them; kept with them, since most steps read the blocks of the one before."""
    record = blocks.prepared.get(CpuKernels.name)
    if record is None:
        whole = _whole_groups(blocks)
        codes, scale, offset = whole.codes, whole.scale, whole.offset
        record = _kernels.Blocks(
            _format(blocks.format),
            None if whole is blocks else whole,
            codes.shape[2],
            codes.data_ptr(),
            scale.data_ptr(),
            offset.data_ptr(),
            codes.stride()[:3],
            scale.stride()[:3],
        )
        # a copy is made anew each time, as what it was made of may change
        if whole is blocks:
            blocks.prepared[CpuKernels.name] = record
    return record


def _exact(buffers: ExactBuffers) -> tuple[Any, Any]:
    """Exact tokens as the module reads them, and who owns that memory; kept with the buffers if it is theirs."""
    found = buffers.prepared.get(CpuKernels.name)
    if found is None:
        keys, values = _rows(buffers.keys), _rows(buffers.values)
        found = _kernels.Exact(_tensor(keys), _tensor(values)), (keys, values)
        # a copy is made anew each time, as what it was made of may change
        if keys is buffers.keys and values is buffers.values:
            buffers.prepared[CpuKernels.name] = found
    return found


@functools.lru_cache(maxsize=256)
def _format(format: PackedFormat) -> Any:
    row_bytes = format.group_bytes // format.planes
    # read as integers where KIVI's geometry is; a codebook in general is not
    upper = format.codebook == UPPER_HALVES
    return _kernels.Format(
        format.nbits,
        format.axis == "channel",
        format.block_length,
        format.head_dim,
        format.channel_groups,
        format.group,
        row_bytes,
        format.groups,
        [] if format.codebook is None else list(format.codebook),
        format.groups * row_bytes if format.hierarchical else 0,
        upper,
    )


@functools.lru_cache(maxsize=256)
def _grid(grid: Grid) -> Any:
    middle = 0 if grid.affine or grid.numbers is not None else 2 ** (grid.nbits - 1)
    if grid.nbits == 8:
        return _kernels.Grid(8 if grid.numbers is None else NUMBERS[grid.numbers], middle, [])
    levels = [float(code - middle) for code in range(2**grid.nbits)] if grid.levels is None else list(grid.levels)
    return _kernels.Grid(grid.nbits, 0, levels)


kernels = CpuKernels(os.environ.get("HFKV_CPU_ISA") or None)
