"""`pack` and `unpack` against the reference: packing to the bit."""

from __future__ import annotations

import pytest
import torch

from hfkv.cache import PackedFormat
from hfkv.kernels import REFERENCE
from hfkv.testing.packing import RoundToNearest, make_blocks, poisoned
from hfkv_cpu.kernels import CpuKernels
from hfkv_cpu.testing import ISAS, WIDTHS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check_pack(states, format, isa):
    with poisoned():
        blocks = CpuKernels(isa).pack(states, format, RoundToNearest())
    expected = REFERENCE.pack(states, format, RoundToNearest())
    torch.testing.assert_close(blocks.scale, expected.scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(blocks.offset, expected.offset, rtol=0, atol=0, equal_nan=True)
    # of each group in each plane
    real = ~expected.scale.isnan().repeat(1, 1, 1, format.planes)
    assert torch.equal(blocks.codes[real], expected.codes[real])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nbits", WIDTHS)
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("head_dim", [20, 64, 80, 128])
def test_pack_is_the_reference_to_the_bit(isa, dtype, nbits, axis, head_dim):
    states = (torch.randn(2, 3, 96, head_dim) * torch.randn(head_dim).exp()).to(dtype)
    check_pack(states, PackedFormat(nbits, axis, 32, head_dim), isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group_size", [8, 16, 24, 64])
@pytest.mark.parametrize("nbits", WIDTHS)
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_pack_group_sizes(isa, group_size, nbits, axis):
    check_pack(torch.randn(1, 2, group_size * 3, 40), PackedFormat(nbits, axis, group_size, 40), isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_pack_halves_and_extremes(isa, axis):
    """Halfway between two codes, groups without a range, numbers beyond float16, infinities and NaN."""
    format = PackedFormat(2, axis, 32, 64)
    halves = torch.randint(0, 7, (1, 1, 32, 64)) / 2.0
    for factor in (1.0, 1e-7, 1e6, 0.0):
        check_pack(halves * factor, format, isa)
    halves[0, 0, 5, 7] = torch.inf
    check_pack(halves, format, isa)
    halves[0, 0, 9, 9] = torch.nan
    halves[0, 0, 31, 63] = torch.nan
    check_pack(halves, format, isa)
    check_pack(torch.full((1, 1, 32, 64), -3.0), format, isa)


@pytest.mark.parametrize("isa", ISAS)
def test_pack_strided_states(isa):
    states = torch.randn(2, 64, 3, 48).transpose(1, 2)
    check_pack(states, PackedFormat(4, "channel", 32, 48), isa)
    check_pack(torch.randn(2, 3, 48, 64).transpose(2, 3), PackedFormat(4, "token", 32, 48), isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nbits", WIDTHS)
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("head_dim", [20, 80, 128])
@pytest.mark.parametrize("group_size", [24, 32])
def test_unpack(isa, dtype, nbits, axis, head_dim, group_size):
    states = torch.randn(2, 3, group_size * 6, head_dim) + torch.randn(head_dim)
    blocks = make_blocks(states, PackedFormat(nbits, axis, group_size, head_dim), grown=True)
    with poisoned():
        result = CpuKernels(isa).unpack(blocks, dtype)
    expected = REFERENCE.unpack(blocks, torch.float32)
    assert result.dtype == dtype
    # a fused multiply-add may round the last bit otherwise
    torch.testing.assert_close(result.float(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("head_dim", [20, 80, 128])
@pytest.mark.parametrize("group_size", [8, 24, 32])
def test_hierarchical_codes(isa, dtype, axis, head_dim, group_size):
    format = PackedFormat(8, axis, group_size, head_dim, hierarchical=True)
    states = (torch.randn(2, 3, group_size * 6, head_dim) + torch.randn(head_dim)).to(dtype)
    check_pack(states, format, isa)
    blocks = make_blocks(states, format, grown=True)
    for part in (blocks, blocks.upper_half):
        with poisoned():
            result = CpuKernels(isa).unpack(part, dtype)
        expected = REFERENCE.unpack(part, torch.float32)
        torch.testing.assert_close(result.float(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("nbits", WIDTHS)
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_unpack_codebook(isa, nbits, axis):
    codebook = tuple(torch.linspace(-1, 1, 2**nbits).pow(3).tolist())
    blocks = make_blocks(torch.randn(1, 2, 64, 64), PackedFormat(nbits, axis, 32, 64, codebook))
    result = CpuKernels(isa).unpack(blocks, torch.float32)
    torch.testing.assert_close(result, REFERENCE.unpack(blocks, torch.float32), rtol=1e-6, atol=1e-6)
