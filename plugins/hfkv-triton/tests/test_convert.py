"""`pack` and `unpack` against the reference: packing to the bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hfkv.cache import PackedFormat
from hfkv.kernels import REFERENCE
from hfkv.testing.packing import RoundToNearest, make_blocks, poisoned
from hfkv_triton.kernels import TritonKernels
from hfkv_triton.testing import WIDTHS

KERNELS = TritonKernels()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check_pack(states, format):
    with poisoned():
        blocks = KERNELS.pack(states, format, RoundToNearest())
    expected = REFERENCE.pack(states, format, RoundToNearest())
    torch.testing.assert_close(blocks.scale, expected.scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(blocks.offset, expected.offset, rtol=0, atol=0, equal_nan=True)
    real = ~expected.scale.isnan()
    assert torch.equal(blocks.codes[real], expected.codes[real])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nbits", WIDTHS)
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("head_dim", [20, 80])
def test_pack_is_the_reference_to_the_bit(device, dtype, nbits, axis, head_dim):
    states = (torch.randn(1, 2, 32, head_dim) * torch.randn(head_dim).exp()).to(device, dtype)
    check_pack(states, PackedFormat(nbits, axis, 32, head_dim))


@pytest.mark.parametrize("group_size", [8, 24, 64])
@pytest.mark.parametrize("nbits", WIDTHS)
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_pack_group_sizes(device, group_size, nbits, axis):
    check_pack(torch.randn(1, 2, group_size * 3, 40, device=device), PackedFormat(nbits, axis, group_size, 40))


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_pack_halves_and_extremes(device, axis):
    """Halfway between two codes, groups without a range, numbers beyond float16, infinities and NaN."""
    format = PackedFormat(2, axis, 32, 64)
    halves = torch.randint(0, 7, (1, 1, 32, 64)).to(device) / 2.0
    for factor in (1.0, 1e-7, 1e6, 0.0):
        check_pack(halves * factor, format)
    halves[0, 0, 5, 7] = torch.inf
    check_pack(halves, format)
    halves[0, 0, 9, 9] = torch.nan
    halves[0, 0, 31, 63] = torch.nan
    check_pack(halves, format)
    check_pack(torch.full((1, 1, 32, 64), -3.0, device=device), format)


def test_pack_strided_states(device):
    states = torch.randn(2, 64, 3, 48, device=device).transpose(1, 2)
    check_pack(states, PackedFormat(4, "channel", 32, 48))
    check_pack(torch.randn(2, 3, 48, 64, device=device).transpose(2, 3), PackedFormat(4, "token", 32, 48))


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_pack_and_unpack_of_no_tokens(device, axis):
    format = PackedFormat(4, axis, 32, 48)
    blocks = KERNELS.pack(torch.randn(2, 3, 0, 48, device=device), format, RoundToNearest())
    assert blocks.count == 0
    assert KERNELS.unpack(blocks, torch.float32).shape == (2, 3, 0, 48)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nbits", WIDTHS)
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("group_size", [24, 32])
def test_unpack(device, dtype, nbits, axis, group_size):
    states = (torch.randn(2, 1, group_size * 3, 80) + torch.randn(80)).to(device)
    blocks = make_blocks(states, PackedFormat(nbits, axis, group_size, 80), grown=True)
    with poisoned():
        result = KERNELS.unpack(blocks, dtype)
    expected = REFERENCE.unpack(blocks, torch.float32)
    assert result.dtype == dtype
    # the last bit may be rounded otherwise
    torch.testing.assert_close(result.float(), expected, rtol=torch.finfo(dtype).eps, atol=5e-6)


@pytest.mark.parametrize("nbits", WIDTHS)
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_unpack_codebook(device, nbits, axis):
    codebook = tuple(torch.linspace(-1, 1, 2**nbits).pow(3).tolist())
    blocks = make_blocks(torch.randn(1, 2, 64, 64, device=device), PackedFormat(nbits, axis, 32, 64, codebook))
    result = KERNELS.unpack(blocks, torch.float32)
    torch.testing.assert_close(result, REFERENCE.unpack(blocks, torch.float32), rtol=1e-6, atol=1e-6)
