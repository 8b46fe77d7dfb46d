"""Every op in plain torch, for any device: the oracle of the fast kernels, and what runs without them.

Nothing here holds more than a bounded chunk of dequantized tokens at a time.
"""

from __future__ import annotations

import torch

from ..cache.packed import PackedBlocks, PackedFormat
from ..cache.quantizer import KVQuantizer
from ..cache.view import KVView
from ..weights.grid import Grid, PackedWeight

# elements of one chunk's dequantized keys (16 MiB in float32)
CHUNK_ELEMENTS = 2**22
# and of a chunk of decoded weights: what is in between stays in the processor's cache
WEIGHT_ELEMENTS = 2**18


def pack_codes(codes: torch.Tensor, nbits: int) -> torch.Tensor:
    """Codes ``[..., group]`` uint8 to bytes ``[..., group * nbits / 8]``, laid out as `PackedBlocks` says."""
    if nbits == 8:
        return codes
    if nbits == 3:
        high = (codes >> 2).unflatten(-1, (-1, 8))
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=codes.device)
        return torch.cat([pack_codes(codes & 3, 2), (high * weights).sum(-1, dtype=torch.uint8)], dim=-1)
    parts = codes.unflatten(-1, (8 // nbits, -1)).unbind(-2)
    packed = parts[0].clone()
    for position, part in enumerate(parts[1:], start=1):
        packed |= part << (position * nbits)
    return packed


def unpack_codes(packed: torch.Tensor, nbits: int) -> torch.Tensor:
    """The inverse of `pack_codes`."""
    if nbits == 8:
        return packed
    if nbits == 3:
        low, high = packed.split([packed.shape[-1] // 3 * 2, packed.shape[-1] // 3], dim=-1)
        shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
        bits = (high.unsqueeze(-1) >> shifts).bitwise_and_(1).flatten(-2)
        return unpack_codes(low, 2) | (bits << 2)
    mask = 2**nbits - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, nbits)], dim=-1)


def pack_planes(codes: torch.Tensor, format: PackedFormat) -> torch.Tensor:
    """Codes of blocks ``[..., groups, group]`` to bytes, those of hierarchical ones in two planes."""
    if not format.hierarchical:
        return pack_codes(codes, format.nbits)
    return torch.cat([pack_codes(codes >> 4, 4), pack_codes(codes & 15, 4)], dim=-2)


def unpack_planes(packed: torch.Tensor, format: PackedFormat) -> torch.Tensor:
    """The inverse of `pack_planes`."""
    if not format.hierarchical:
        return unpack_codes(packed, format.nbits)
    upper, lower = unpack_codes(packed, 4).split(format.groups, dim=-2)
    return (upper << 4) | lower


def numbers_of(codes: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Codes ``[rows, inputs]`` of a weight, one a byte, as float32 in units of the scale."""
    if grid.levels is not None:
        return torch.tensor(grid.levels, device=codes.device)[codes.int()]
    values = codes.float()
    return values if grid.affine or grid.numbers is not None else values.sub_(2 ** (grid.nbits - 1))


def scaled(values: torch.Tensor, group: int, scale: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
    """Multiply ``[rows, inputs]`` by the scales ``[rows or 1, groups]``, and add the offsets, in place."""
    inputs = values.shape[1]
    whole = inputs // group
    parts = [(slice(0, whole * group), slice(0, whole))]
    if whole * group < inputs:
        # the last group is shorter
        parts.append((slice(whole * group, None), slice(-1, None)))
    for columns, part in parts:
        factor = scale[:, part, None].float()
        groups = values[:, columns].unflatten(1, (factor.shape[1], -1)).mul_(factor)
        if offset is not None:
            groups.add_(offset[:, part, None].float())
    return values


def _to_groups(states: torch.Tensor, format: PackedFormat) -> torch.Tensor:
    """``[batch, heads, tokens, head_dim]`` to ``[batch, heads, blocks, groups, group]``."""
    blocks = states.unflatten(2, (-1, format.block_length))
    if format.axis == "channel":
        return blocks.transpose(-1, -2)
    missing = format.channel_groups * format.group - format.head_dim
    if missing:
        # repeat the last channel: padding must not widen the last group's range
        blocks = torch.cat([blocks, blocks[..., -1:].expand(*blocks.shape[:-1], missing)], dim=-1)
    return blocks.unflatten(-1, (format.channel_groups, format.group)).transpose(3, 4).flatten(3, 4)


def _from_groups(groups: torch.Tensor, format: PackedFormat) -> torch.Tensor:
    if format.axis == "channel":
        return groups.transpose(-1, -2).flatten(2, 3)
    parts = groups.unflatten(3, (format.channel_groups, format.block_length))
    return parts.transpose(3, 4).flatten(4, 5).flatten(2, 3)[..., : format.head_dim]


def _chunks(blocks: int, elements_per_block: int) -> range:
    return range(0, blocks, max(1, CHUNK_ELEMENTS // elements_per_block))


class ReferenceKernels:
    """The op table's reference implementation."""

    name = "reference"

    def supports(self, request: object) -> tuple[bool, str]:
        """Everything is supported."""
        return True, "plain torch, any device"

    def pack(self, states: torch.Tensor, format: PackedFormat, quantizer: KVQuantizer) -> PackedBlocks:
        """Quantize whole blocks.

        Parameters
        ----------
        states
            ``[batch, kv_heads, tokens, head_dim]``, tokens a multiple of the block length.
        format
            How they are packed.
        quantizer
            Decides codes, scale and offset of each group.
        """
        batch, heads, tokens, head_dim = states.shape
        count = tokens // format.block_length
        result = PackedBlocks.empty(format, batch, heads, count, states.device)
        steps = _chunks(count, batch * heads * format.block_length * head_dim)
        for start in steps:
            stop = min(start + steps.step, count)
            chunk = states[:, :, start * format.block_length : stop * format.block_length]
            groups = _to_groups(chunk.float(), format).contiguous()
            codes, scale, offset = quantizer.quantize(groups, format.nbits)
            result.codes[:, :, start:stop] = pack_planes(codes, format)
            result.scale[:, :, start:stop] = scale
            result.offset[:, :, start:stop] = offset
        return result

    def unpack(self, blocks: PackedBlocks, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize blocks.

        Parameters
        ----------
        blocks
            Any number of them.
        dtype
            Of the result.

        Returns
        -------
        torch.Tensor
            ``[batch, kv_heads, tokens, head_dim]``.
        """
        format = blocks.format
        batch, heads = blocks.codes.shape[:2]
        result = torch.empty(batch, heads, blocks.length, format.head_dim, dtype=dtype, device=blocks.codes.device)
        steps = _chunks(blocks.count, batch * heads * format.block_length * format.head_dim)
        for start in steps:
            part = blocks.narrow(start, min(steps.step, blocks.count - start))
            begin = start * format.block_length
            result[:, :, begin : begin + part.length] = self._dequantize(part)
        return result

    @staticmethod
    def _dequantize(blocks: PackedBlocks) -> torch.Tensor:
        format = blocks.format
        codes = unpack_planes(blocks.codes, format)
        if format.codebook is None:
            levels = codes.float()
        else:
            levels = torch.tensor(format.codebook, dtype=torch.float32, device=codes.device)[codes.int()]
        groups = levels.mul_(blocks.scale.float().unsqueeze(-1)).add_(blocks.offset.float().unsqueeze(-1))
        return _from_groups(groups, format)

    def attend(
        self,
        query: torch.Tensor,
        view: KVView,
        mask: torch.Tensor | None,
        scale: float,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over packed and exact segments, joined by their log-sum-exp.

        Parameters
        ----------
        query
            ``[batch, heads, queries, head_dim]``; ``heads`` a multiple of the KV heads.
        view
            The layer's segments; the current forward's tokens are its newest exact ones.
        mask
            ``[batch or 1, heads or 1, queries, tokens]`` in stored order (`KVView.arrange`), boolean (True attends) or
            additive; None attends to all.
        scale
            What the scores are multiplied by.
        causal
            Without a mask: query ``i`` of ``n`` sees all but the newest ``n - 1 - i`` tokens.

        Returns
        -------
        tuple
            ``[batch, heads, queries, value_head_dim]`` in the query's dtype, and the log-sum-exp of the scores
            ``[batch, heads, queries]`` in float32. A query that attends to nothing gets zeros and ``-inf``.
        """
        batch, heads, queries, _ = query.shape
        kv_heads = view.exact_keys.shape[1]
        share = heads // kv_heads
        # the query heads of a KV head are rows of one matrix product: keys and values are never repeated
        rows = (query.float() * scale).reshape(batch, kv_heads, share * queries, -1)
        if mask is None and causal and queries > 1:
            mask = torch.ones(queries, view.length, dtype=torch.bool, device=query.device)
            mask = mask.tril_(view.length - queries)[None, None]
        state = _OnlineSoftmax(rows, view.values.format.head_dim)
        format = view.keys.format
        steps = _chunks(view.keys.count, batch * kv_heads * format.block_length * format.head_dim)
        for start in steps:
            keys = view.keys.narrow(start, min(steps.step, view.keys.count - start))
            values = view.values.narrow(start, keys.count)
            begin = view.sink + start * format.block_length
            part = None if mask is None else mask[..., begin : begin + keys.length]
            state.add(self._dequantize(keys), self._dequantize(values), _fold_mask(part, kv_heads, share))
        exact_mask = None
        if mask is not None:
            end = view.sink + view.keys.length
            exact_mask = torch.cat([mask[..., : view.sink], mask[..., end:]], dim=-1)
        state.add(view.exact_keys.float(), view.exact_values.float(), _fold_mask(exact_mask, kv_heads, share))
        output, lse = state.finish()
        return (
            output.reshape(batch, heads, queries, -1).to(query.dtype),
            lse.reshape(batch, heads, queries),
        )

    def dequantize(self, weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize a weight, computed in float32 and rounded once.

        Parameters
        ----------
        weight
            The packed weight ``[outputs, inputs]``.
        dtype
            The dtype of the result.

        Returns
        -------
        torch.Tensor
            ``[outputs, inputs]``.
        """
        result = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=weight.codes.device)
        for rows in _row_chunks(weight):
            result[rows] = self._rows(weight, rows)
        return result

    def matmul(self, states: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """Product with a packed weight, in float32 and rounded once.

        Parameters
        ----------
        states
            ``[rows, inputs]``.
        weight
            The packed weight ``[outputs, inputs]``.

        Returns
        -------
        torch.Tensor
            ``[rows, outputs]``, in the dtype of the states.
        """
        result = states.new_empty(states.shape[0], weight.outputs)
        for rows in _row_chunks(weight):
            result[:, rows] = (states.float() @ self._rows(weight, rows).T).to(states.dtype)
        return result

    def _rows(self, weight: PackedWeight, rows: slice) -> torch.Tensor:
        grid, codes = weight.grid, weight.codes[rows]
        if grid.numbers is None:
            codes = unpack_codes(codes, grid.nbits)[:, : weight.inputs]
        # a whole tensor has one row of scales
        scale, offset = (
            part if part is None or grid.per_tensor else part[rows] for part in (weight.scale, weight.offset)
        )
        assert scale is not None
        return scaled(numbers_of(codes, grid), weight.group, scale, offset)


def _row_chunks(weight: PackedWeight) -> list[slice]:
    step = max(1, WEIGHT_ELEMENTS // weight.inputs)
    return [slice(start, start + step) for start in range(0, weight.outputs, step)]


def _fold_mask(mask: torch.Tensor | None, kv_heads: int, share: int) -> torch.Tensor | None:
    """``[batch, heads or 1, queries, tokens]`` to ``[batch, kv_heads or 1, share * queries, tokens]``."""
    if mask is None or share == 1:
        return mask
    if mask.shape[1] == 1:
        return mask.repeat(1, 1, share, 1)
    return mask.reshape(mask.shape[0], kv_heads, share * mask.shape[2], mask.shape[3])


class _OnlineSoftmax:
    """Softmax-weighted values of tokens that arrive in chunks (Milakov and Gimelshein, 2018)."""

    def __init__(self, rows: torch.Tensor, value_dim: int) -> None:
        self._rows = rows
        self._maximum = rows.new_full(rows.shape[:-1], torch.finfo(torch.float32).min)
        self._total = rows.new_zeros(rows.shape[:-1])
        self._sum = rows.new_zeros(*rows.shape[:-1], value_dim)

    def add(self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> None:
        scores = self._rows @ keys.transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()
        maximum = torch.maximum(self._maximum, scores.amax(-1))
        weights = scores.sub_(maximum.unsqueeze(-1)).exp_()
        kept = (self._maximum - maximum).exp_()
        self._total = self._total * kept + weights.sum(-1)
        self._sum = self._sum * kept.unsqueeze(-1) + weights @ values
        self._maximum = maximum

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        output = self._sum / self._total.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
        return output, self._maximum + self._total.log()
