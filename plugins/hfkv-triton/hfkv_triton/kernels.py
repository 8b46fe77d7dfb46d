"""The op table's entry for GPUs: which requests, what shapes to compile for, how many programs."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import torch

from hfkv.cache import KVQuantizer, KVView, PackedBlocks, PackedFormat
from hfkv.kernels import Request

try:
    import triton
except ImportError as error:
    raise ImportError("triton is not installed. Fix: pip install triton, or the build of torch for your GPU") from error

from . import attend, convert

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# what TRITON_INTERPRET=1 makes of a kernel, when it is decorated
INTERPRETED = not isinstance(attend.attend, triton.JITFunction)
# the interpreter has no processors: as few as still split the context
INTERPRETED_PROCESSORS = 1
# programs for each processor, so that one waits for memory while others work
PROGRAMS_PER_PROCESSOR = 4
# tiles of a share: fewer would not be worth the merge
LEAST_TILES = 2
# (tokens, warps, stages) of a tile by padded channels, for a step of decoding: the fewest rows of a matrix product
DECODE_TILES = {64: (64, 4, 3), 128: (64, 4, 2), 256: (32, 4, 2), 512: (32, 8, 2)}
# (rows, tokens, warps, stages) for more rows; all that fit the registers of compute capability 8.0 and 9.0
TILES = {64: (64, 64, 4, 3), 128: (64, 32, 8, 2), 256: (32, 32, 8, 2), 512: (16, 32, 8, 2)}
LEAST_ROWS = 16


class TritonKernels:
    """Kernels for what Triton runs on: CUDA, ROCm (whose devices torch calls "cuda" too), Intel GPUs.

    Parameters
    ----------
    processors
        What the context is split for; None asks the device at the first call.
    """

    name = "triton"

    def __init__(self, processors: int | None = None) -> None:
        self._processors = processors

    def supports(self, request: Request) -> tuple[bool, str]:
        """Any format and shape on a GPU; packing by round to nearest only."""
        if request.dtype not in FLOATS:
            return False, f"{request.dtype} is not one of float32, bfloat16, float16"
        if len({format.block_length for format in request.formats}) > 1:
            return False, "keys and values are in blocks of different lengths"
        if any(format.head_dim > max(TILES) for format in request.formats):
            return False, f"heads have more than {max(TILES)} channels"
        if any(format.hierarchical for format in request.formats):
            return False, "reads no hierarchical codes, whose 8 bits are in two planes"
        if request.op == "pack":
            if request.quantizer != "rtn":
                return False, f"packs with backend 'rtn' only; {request.quantizer!r} decides its codes in torch"
            if request.formats[0].codebook is not None:
                return False, "packs uniform grids only, not codebooks"
        if INTERPRETED:
            # a hundred times slower than anything else: whoever debugs other kernels has not asked for it
            if os.environ.get("HFKV_KERNELS") == self.name:
                return True, f"Triton {triton.__version__}, interpreted"
            return False, "TRITON_INTERPRET=1: right, and slow, so only where HFKV_KERNELS=triton asks for it"
        return _supports_device(request.device)

    def pack(self, states: torch.Tensor, format: PackedFormat, quantizer: KVQuantizer) -> PackedBlocks:
        """Quantize whole blocks, to the bit as `ReferenceKernels.pack`."""
        batch, heads, tokens, _ = states.shape
        count = tokens // format.block_length
        blocks = PackedBlocks.empty(format, batch, heads, count, states.device)
        plan = pack_plan(format)
        programs = batch * heads * count * triton.cdiv(format.groups, plan["TILE"])
        if programs:
            with _on(states.device):
                convert.pack[(programs,)](
                    states, blocks.codes, blocks.scale, blocks.offset, *states.stride(), heads, count, **plan
                )  # fmt: skip
        return blocks

    def unpack(self, blocks: PackedBlocks, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize blocks (`ReferenceKernels.unpack`)."""
        blocks, format = _whole_groups(blocks), blocks.format
        batch, heads = blocks.codes.shape[:2]
        device = blocks.codes.device
        states = torch.empty(batch, heads, blocks.length, format.head_dim, dtype=dtype, device=device)
        plan = unpack_plan(format)
        programs = batch * heads * blocks.count * triton.cdiv(format.block_length, plan["TOKENS"])
        if programs:
            with _on(device):
                convert.unpack[(programs,)](
                    states, blocks.codes, blocks.scale, blocks.offset, _book(format, device),
                    *blocks.codes.stride()[:3], *blocks.scale.stride()[:3], heads, blocks.count, **plan,
                )  # fmt: skip
        return states

    def attend(
        self, query: torch.Tensor, view: KVView, mask: torch.Tensor | None, scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over packed and exact segments (`ReferenceKernels.attend`)."""
        batch, heads, queries, _ = query.shape
        device, kv_heads = query.device, view.exact_keys.shape[1]
        keys, values = _whole_groups(view.keys), _whole_groups(view.values)
        plan = attend_plan(keys.format, values.format, heads // kv_heads, queries, query.dtype)
        row_tiles = triton.cdiv(heads // kv_heads * queries, plan["ROWS"])
        packed_tiles = triton.cdiv(keys.length, plan["TOKENS"])
        exact_tiles = triton.cdiv(view.exact_keys.shape[2], plan["TOKENS"])
        share = self._share(row_tiles * batch * kv_heads, packed_tiles + exact_tiles, device)
        packed_splits, exact_splits = triton.cdiv(packed_tiles, share), triton.cdiv(exact_tiles, share)
        splits = packed_splits + exact_splits

        # as the caller wants it in the end: [batch, queries, heads, channels] is contiguous
        output = query.new_empty(batch, queries, heads, values.format.head_dim).transpose(1, 2)
        lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=device)
        parts = torch.empty(splits, *output.shape, dtype=torch.float32, device=device)
        part_lse = torch.empty(splits, *lse.shape, dtype=torch.float32, device=device)
        mask_kind, mask_strides = 0, (0, 0, 0, 0)
        if mask is not None:
            mask_kind = 1 if mask.dtype == torch.bool else 2
            mask = mask.expand(batch, heads, queries, -1)
            mask_strides = mask.stride()
            mask = mask.view(torch.uint8) if mask_kind == 1 else mask
        key_codes, value_codes = _readable(keys, plan["KEY_WORDS"]), _readable(values, plan["VALUE_WORDS"])
        with _on(device):
            attend.attend[(row_tiles, batch * kv_heads, splits)](
                parts, part_lse, query, view.exact_keys, view.exact_values, lse if mask is None else mask,
                key_codes, keys.scale, keys.offset, value_codes, values.scale, values.offset,
                _book(keys.format, device), _book(values.format, device),
                *parts.stride(), part_lse.stride(0), *query.stride(),
                *view.exact_keys.stride(), *view.exact_values.stride(),
                *key_codes.stride()[:3], *keys.scale.stride()[:3],
                *value_codes.stride()[:3], *values.scale.stride()[:3], *mask_strides,
                scale, kv_heads, queries, keys.count, view.exact_keys.shape[2], view.sink, packed_splits, share,
                MASK=mask_kind, CAUSAL=causal and mask is None and queries > 1, **plan,
            )  # fmt: skip
            attend.merge[(batch * heads * queries,)](
                output, lse, parts, part_lse, *output.stride(), parts.stride(0), part_lse.stride(0),
                heads, queries, splits,
                DIM=values.format.head_dim, PAD=_channel_tile(values.format), SPLITS=16,
            )  # fmt: skip
        return output, lse

    def _share(self, programs: int, tiles: int, device: torch.device) -> int:
        """Tiles of a program, so that every processor has some."""
        processors = self._processors or _processors(device)
        wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * processors, programs)
        return max(LEAST_TILES, triton.cdiv(tiles, wanted))


@functools.cache
def _supports_device(device: str) -> tuple[bool, str]:
    if device == "cpu":
        return False, "runs on GPUs; on the CPU only in Triton's interpreter: TRITON_INTERPRET=1 HFKV_KERNELS=triton"
    if device not in ("cuda", "xpu"):
        return False, f"Triton does not run on {device}"
    if not torch.get_device_module(device).is_available():
        return False, f"torch finds no device {device}"
    if device == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability()
        if major < 8:
            return False, f"compute capability {major}.{minor} is below 8.0"
    return True, f"Triton {triton.__version__}"


@functools.cache
def _processors(device: torch.device) -> int:
    if INTERPRETED:
        return INTERPRETED_PROCESSORS
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).max_compute_units)
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def attend_plan(
    keys: PackedFormat, values: PackedFormat, shared: int, queries: int, dtype: torch.dtype
) -> dict[str, Any]:
    """The compile-time arguments of `attend.attend`."""
    key_pad, value_pad = _channel_tile(keys), _channel_tile(values)
    widest, rows = max(64, key_pad, value_pad), shared * queries
    most, tokens, warps, stages = TILES[widest]
    if rows <= LEAST_ROWS:
        most, (tokens, warps, stages) = LEAST_ROWS, DECODE_TILES[widest]
    operands, precision = _operands(dtype)
    key_words = keys.axis == "channel" and _in_words(keys)
    value_words = values.axis == "token" and _in_words(values)
    if value_words:
        # whole words, which may be more than the channels that a power of two holds
        positions = _codes_per_word(values)
        value_pad = positions * triton.next_power_of_2(values.channel_groups * values.group // positions)
    return {
        "SHARED": shared,
        "BLOCK": keys.block_length,
        "ROWS": min(most, max(LEAST_ROWS, triton.next_power_of_2(rows))),
        "TOKENS": tokens,
        "KEY_PAD": key_pad,
        "KEY_WORDS": key_words,
        "VALUE_PAD": max(16, value_pad),
        "VALUE_WORDS": value_words,
        "DTYPE": operands,
        "PRECISION": precision,
        "num_warps": warps,
        "num_stages": stages,
        **_format_arguments("KEY", keys),
        **_format_arguments("VALUE", values),
    }


@functools.cache
def pack_plan(format: PackedFormat) -> dict[str, Any]:
    """The compile-time arguments of `convert.pack`."""
    plane_bits = 2 if format.nbits == 3 else format.nbits
    width = triton.next_power_of_2(format.group)
    return {
        "NBITS": format.nbits,
        "CHANNEL": format.axis == "channel",
        "GROUP": format.group,
        "BLOCK": format.block_length,
        "DIM": format.head_dim,
        "GROUPS": format.groups,
        "TILE": min(triton.next_power_of_2(format.groups), max(1, 4096 // width)),
        "WIDTH": width,
        "PARTS": 8 // plane_bits,
        "BYTES": triton.next_power_of_2(format.group * plane_bits // 8),
    }


@functools.cache
def unpack_plan(format: PackedFormat) -> dict[str, Any]:
    """The compile-time arguments of `convert.unpack`."""
    return {
        "NBITS": format.nbits,
        "CHANNEL": format.axis == "channel",
        "GROUP": format.group,
        "BOOK": format.codebook is not None,
        "BLOCK": format.block_length,
        "DIM": format.head_dim,
        "TOKENS": min(64, triton.next_power_of_2(format.block_length)),
        "PAD": _channel_tile(format),
    }


def _format_arguments(name: str, format: PackedFormat) -> dict[str, Any]:
    return {
        f"{name}_DIM": format.head_dim,
        f"{name}_BITS": format.nbits,
        f"{name}_CHANNEL": format.axis == "channel",
        f"{name}_GROUP": format.group,
        f"{name}_BOOK": format.codebook is not None,
    }


def _codes_per_word(format: PackedFormat) -> int:
    """Codes that a 32-bit word holds; of three bits, the plane of the low two."""
    return 32 // (2 if format.nbits == 3 else format.nbits)


def _in_words(format: PackedFormat) -> bool:
    """Whether every group is whole 32-bit words; of three bits, only where the high plane is one word."""
    if format.nbits == 3:
        return format.group == 32
    return format.group % _codes_per_word(format) == 0


def _readable(blocks: PackedBlocks, words: bool) -> torch.Tensor:
    return blocks.codes.view(torch.int32) if words else blocks.codes


def _operands(dtype: torch.dtype) -> tuple[Any, str]:
    """The dtype of matrix operands, and how exactly they are multiplied.

    float16 would not hold weights times scales, so float16 models have operands of its precision and a wider range.
    """
    if INTERPRETED:
        return triton.language.float32, "ieee"
    if dtype == torch.bfloat16:
        return triton.language.bfloat16, "ieee"
    if torch.version.hip is not None or torch.version.cuda is None:
        return triton.language.float32, "ieee"
    return triton.language.float32, "tf32" if dtype == torch.float16 else "tf32x3"


def _channel_tile(format: PackedFormat) -> int:
    return max(16, triton.next_power_of_2(format.head_dim))


@functools.lru_cache(maxsize=64)
def _book_of(codebook: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(codebook, dtype=torch.float32, device=device)


def _book(format: PackedFormat, device: torch.device) -> torch.Tensor | None:
    return None if format.codebook is None else _book_of(format.codebook, device)


def _whole_groups(blocks: PackedBlocks) -> PackedBlocks:
    """The same blocks, each of them contiguous: stores make them so, and views of stores keep it."""
    codes, scale, offset = blocks.codes, blocks.scale, blocks.offset
    within = (blocks.format.group_bytes, 1)
    if codes.stride()[3:] == within and scale.stride(3) == 1 and scale.stride() == offset.stride():
        return blocks
    return blocks.map(torch.Tensor.contiguous)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    manager: contextlib.AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return manager


kernels = TritonKernels()
