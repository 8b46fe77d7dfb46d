"""Views as attention is handed them, made of random numbers, and the comparison with the reference."""

from __future__ import annotations

from typing import Any

import torch

from hfkv.cache import KVView, PackedFormat
from hfkv.kernels import REFERENCE
from hfkv.testing.packing import make_blocks, poisoned

WIDTHS = (2, 3, 4, 8)
FINITE = torch.finfo(torch.float32).min
# relative to the reference in float32, whose operands are those of the kernels: tensor cores round what they multiply
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def make_view(
    *,
    batch: int = 1,
    kv_heads: int = 2,
    head_dim: int = 32,
    value_head_dim: int | None = None,
    key_nbits: int = 4,
    value_nbits: int = 4,
    group_size: int = 32,
    blocks: int = 5,
    exact: int = 37,
    sink: int = 4,
    key_axis: Any = "channel",
    value_axis: Any = "token",
    codebook: tuple[float, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    grown: bool = False,
    strided: bool = False,
) -> KVView:
    """A view of random keys and values; ``exact`` counts the residual, the sink comes on top."""
    generator = torch.Generator().manual_seed(0)
    value_head_dim = value_head_dim or head_dim

    def states(tokens: int, channels: int) -> torch.Tensor:
        shape = (batch, tokens, kv_heads, channels) if strided else (batch, kv_heads, tokens, channels)
        result = torch.randn(shape, generator=generator).to(device, dtype)
        return result.transpose(1, 2) if strided else result

    formats = (
        PackedFormat(key_nbits, key_axis, group_size, head_dim, codebook),
        PackedFormat(value_nbits, value_axis, group_size, value_head_dim, codebook),
    )
    packed = []
    for format in formats:
        # a level of its own for each channel, as keys have it
        level = torch.randn(format.head_dim, generator=generator).to(device, dtype)
        packed.append(make_blocks(states(blocks * format.block_length, format.head_dim) + level, format, grown))
    return KVView.of(states(sink + exact, head_dim), states(sink + exact, value_head_dim), sink, *packed)


def check_attend(
    kernels: Any,
    view: KVView,
    query: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run an `attend`, with fresh allocations poisoned, and compare it with the reference in float32.

    Raises
    ------
    AssertionError
        The output or the log-sum-exp is further from the reference than its dtype allows.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    with poisoned():
        output, lse = kernels.attend(query, view, mask, scale, causal)
    expected, expected_lse = REFERENCE.attend(query.float(), view, mask, scale, causal)
    if output.dtype != query.dtype or output.shape != expected.shape:
        raise AssertionError(f"{tuple(output.shape)} {output.dtype}, expected {tuple(expected.shape)} {query.dtype}")
    tolerance = TOLERANCE[query.dtype]
    # one number may be rounded more than all of them are on average
    difference = output.float() - expected
    error = (difference.norm() / expected.norm().clamp_min(1e-30)).item()
    worst = (difference.abs().max() / expected.abs().max().clamp_min(1e-30)).item()
    if not (error < tolerance and worst < 2 * tolerance):
        raise AssertionError(f"relative error {error:.2e}, worst {worst:.2e}, allowed {tolerance:.0e}")
    torch.testing.assert_close(lse, expected_lse, rtol=tolerance, atol=tolerance)
    return output, lse
