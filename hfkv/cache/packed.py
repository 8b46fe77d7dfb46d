"""The packed storage that every quantizer and every kernel shares.

A block holds ``group_size`` tokens. Its elements are cut into groups that share a scale and an offset:

* ``axis="channel"``: one group per channel, over the tokens of the block (KIVI's keys);
* ``axis="token"``: one group per token and run of channels (KIVI's values).

A group's codes lie next to each other, so that a kernel unpacks one group with one load and folds its scale into
what it multiplies. An element is ``levels[code] * scale + offset``, where ``levels`` is 0, 1, 2, ... or a codebook.

Codes of 8 bits can be hierarchical (Tiwari et al., "QuantSpec: Self-Speculative Decoding with Hierarchical Quantized KV
Cache", 2025): the upper halves of a block's codes come first, then the lower ones. The upper halves alone are blocks of
4 bits with the same scales and offsets: a coarser view that takes no memory, and half of the codes to read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch

Axis = Literal["channel", "token"]
SCALE_DTYPE = torch.float16
# what the upper half of an 8-bit code stands for: the middle of the 16 codes that have it
UPPER_HALVES = tuple(16.0 * half + 8 for half in range(16))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class PackedFormat:
    """How the keys or the values of a layer are packed.

    Parameters
    ----------
    nbits
        2, 3, 4 or 8 bits per code.
    axis
        ``"channel"`` or ``"token"``: what a group belongs to.
    group_size
        Elements per group, a multiple of 8; also the tokens of a block. Along channels a group is narrowed so that
        equal groups cover ``head_dim``, and padded to a multiple of 8 (80 channels at 32: three groups of 32).
    head_dim
        Channels of a token.
    codebook
        ``2**nbits`` levels in place of the uniform grid, or None.
    hierarchical
        Whether the 8 bits of a code are in two planes of 4, which the uniform grid alone can be.

    Raises
    ------
    ValueError
        Hierarchical codes of other than 8 bits, or of a codebook.
    """

    nbits: int
    axis: Axis
    group_size: int
    head_dim: int
    codebook: tuple[float, ...] | None = None
    hierarchical: bool = False

    def __post_init__(self) -> None:
        """Check what can be hierarchical."""
        if self.hierarchical and (self.nbits != 8 or self.codebook is not None):
            kind = f"{self.nbits} bits" if self.codebook is None else "a codebook"
            raise ValueError(f"hierarchical codes are the 8 bits of a uniform grid, and these have {kind}")

    @property
    def block_length(self) -> int:
        """Tokens of a block."""
        return self.group_size

    @cached_property
    def channel_groups(self) -> int:
        """Groups along the channels of one token (1 for ``axis="channel"``, whose groups run along tokens)."""
        return 1 if self.axis == "channel" else -(-self.head_dim // self.group_size)

    @cached_property
    def group(self) -> int:
        """Elements of one group."""
        if self.axis == "channel":
            return self.group_size
        return _round_up(-(-self.head_dim // self.channel_groups), 8)

    @cached_property
    def groups(self) -> int:
        """Groups of one block of one head."""
        return self.head_dim if self.axis == "channel" else self.channel_groups * self.block_length

    @cached_property
    def group_bytes(self) -> int:
        """Bytes of one group's codes."""
        return self.group * self.nbits // 8

    @cached_property
    def planes(self) -> int:
        """Into how many planes the codes of a block are cut, one after the other."""
        return 2 if self.hierarchical else 1

    @cached_property
    def upper_half(self) -> PackedFormat:
        """The format of the upper halves of hierarchical codes."""
        return replace(self, nbits=4, codebook=UPPER_HALVES, hierarchical=False)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block of one head: codes, scales and offsets."""
        return self.groups * (self.group_bytes + 2 * SCALE_DTYPE.itemsize)


class WithPrepared:
    """A dataclass of tensors, with which kernels keep what they made of them."""

    @cached_property
    def prepared(self) -> dict[str, Any]:
        """What kernels keep with these very tensors, by the kernels' name, such as addresses; copies have none."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """The fields, for copies and pickles: what is derived from their tensors is not the copy's."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class PackedBlocks(WithPrepared):
    """Blocks of packed keys or values.

    Attributes
    ----------
    codes
        ``[batch, kv_heads, blocks, planes * groups, group_bytes / planes]`` uint8. Groups are in the order of the
        channels (``axis="channel"``) or of (run of channels, token). Within a group of ``g`` elements, byte ``i`` of
        the ``g * nbits / 8`` holds elements ``i``, ``i + bytes``, ``i + 2 * bytes``, ... from the lowest bits up. Three
        bits are two parts: the low two bits so, then the high bits, element ``e`` at bit ``e % 8`` of byte ``e // 8``.
        Hierarchical codes are two planes of 4 bits: the upper halves of all groups, then the lower ones.
    scale, offset
        ``[batch, kv_heads, blocks, groups]`` float16.
    """

    format: PackedFormat
    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor

    @cached_property
    def count(self) -> int:
        """Number of blocks."""
        return self.codes.shape[2]

    @cached_property
    def length(self) -> int:
        """Number of tokens."""
        return self.count * self.format.block_length

    @cached_property
    def upper_half(self) -> PackedBlocks:
        """A view of the upper halves of hierarchical codes; the blocks themselves where there is one plane."""
        if not self.format.hierarchical:
            return self
        return replace(self, format=self.format.upper_half, codes=self.codes.narrow(3, 0, self.format.groups))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PackedBlocks:
        """The same blocks with every tensor passed through a function."""
        return replace(self, codes=function(self.codes), scale=function(self.scale), offset=function(self.offset))

    def narrow(self, start: int, count: int) -> PackedBlocks:
        """A view of ``count`` blocks from ``start`` on."""
        return self.map(lambda tensor: tensor.narrow(2, start, count))

    @staticmethod
    def empty(
        format: PackedFormat, batch: int, heads: int, count: int, device: torch.device | str = "cpu"
    ) -> PackedBlocks:
        """Uninitialized room for ``count`` blocks."""
        shape = (batch, heads, count, format.groups)
        rows, row_bytes = format.planes * format.groups, format.group_bytes // format.planes
        return PackedBlocks(
            format,
            torch.empty(*shape[:3], rows, row_bytes, dtype=torch.uint8, device=device),
            torch.empty(shape, dtype=SCALE_DTYPE, device=device),
            torch.empty(shape, dtype=SCALE_DTYPE, device=device),
        )


class PackedStore:
    """A run of blocks with room to grow: appended at its end, freed from its front.

    Room grows by 1/32, at least four blocks: an append copies a constant number of bytes on average, and at most
    3 % of what is stored is unused. Freed blocks are moved out of the way when the room is used up, or when they are
    more than 1/8 of what is left (at least four), so their cost per block is constant too. The tensors in use are
    replaced, never moved, so views taken before stay valid.
    """

    def __init__(self, format: PackedFormat, batch: int, heads: int, device: torch.device) -> None:
        self.format = format
        self.count = 0
        # blocks that were freed from the front of the room
        self._freed = 0
        self._room = PackedBlocks.empty(format, batch, heads, 0, device)
        # the view of the part in use, which every step asks for and few steps change
        self._used: PackedBlocks | None = None

    def __getstate__(self) -> dict[str, Any]:
        # a pickle would store the same bytes twice
        return {**vars(self), "_used": None}

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.count * self.format.block_length

    @property
    def nbytes(self) -> int:
        """Bytes of storage, room to grow included."""
        room = self._room
        return sum(tensor.untyped_storage().nbytes() for tensor in (room.codes, room.scale, room.offset))

    def view(self) -> PackedBlocks:
        """The blocks in use, without a copy."""
        if self._used is None:
            self._used = self._room.narrow(self._freed, self.count)
        return self._used

    def extend(self, blocks: PackedBlocks) -> None:
        """Append blocks of the same format, batch and heads."""
        needed = self.count + blocks.count
        if self.count == 0:
            # the prompt's blocks: kept as they are, exactly sized
            self._room, self._freed = blocks, 0
        else:
            if self._freed + needed > self._room.count:
                self._reserve(max(needed, self.count + max(4, self.count // 32)))
            start, end = self._freed + self.count, self._freed + needed
            for name in ("codes", "scale", "offset"):
                getattr(self._room, name)[:, :, start:end] = getattr(blocks, name)
        self.count = needed
        self._used = None

    def _reserve(self, count: int) -> None:
        batch, heads = self._room.codes.shape[:2]
        room = PackedBlocks.empty(self.format, batch, heads, count, self._room.codes.device)
        for name in ("codes", "scale", "offset"):
            getattr(room, name)[:, :, : self.count] = getattr(self.view(), name)
        self._room, self._freed = room, 0
        self._used = None

    def free(self, count: int) -> None:
        """Drop the first ``count`` blocks."""
        self.count -= count
        self._freed += count
        self._used = None
        if self._freed > max(4, self.count // 8):
            self._reserve(self.count + max(4, self.count // 32))

    def truncate(self, count: int) -> None:
        """Keep the first ``count`` blocks; their bytes stay until the next growth, unless none is kept."""
        self.count = count
        self._used = None
        if count == 0:
            self._room, self._freed = self._room.map(lambda tensor: tensor[:, :, :0].clone()), 0

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every tensor by what a function makes of the part in use (rows selected, device changed)."""
        self._room, self._freed = self.view().map(function), 0
        self._used = None
