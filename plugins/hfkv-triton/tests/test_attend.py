"""`attend` against the dequantized reference, over formats, shapes and masks."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hfkv_triton.kernels import TritonKernels
from hfkv_triton.testing import FINITE, WIDTHS, check_attend, make_view

KERNELS = TritonKernels()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(device, query_heads, queries, mask=None, *, causal=False, scale=None, kernels=KERNELS, **view):
    view = make_view(device=device, **view)
    batch, _, _, head_dim = view.exact_keys.shape
    query = torch.randn(batch, query_heads, queries, head_dim).to(device, view.exact_keys.dtype)
    return check_attend(kernels, view, query, mask, causal=causal, scale=scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("key_nbits", "value_nbits"), [(w, w) for w in WIDTHS] + [(2, 8)])
def test_decode_step(device, dtype, key_nbits, value_nbits):
    check(device, 4, 1, kv_heads=1, blocks=3, exact=9, key_nbits=key_nbits, value_nbits=value_nbits, dtype=dtype)


@pytest.mark.parametrize(("nbits", "head_dim"), [(2, 80), (3, 80), (4, 20), (4, 128), (8, 20), (3, 64)])
def test_head_dims(device, nbits, head_dim):
    check(device, 4, 1, kv_heads=1, key_nbits=nbits, value_nbits=nbits, head_dim=head_dim, blocks=2, exact=9)


@pytest.mark.parametrize("head_dims", [(96, 40), (16, 8), (8, 256), (512, 24)])
def test_keys_and_values_of_different_width(device, head_dims):
    check(device, 2, 2, kv_heads=1, head_dim=head_dims[0], value_head_dim=head_dims[1], blocks=3, causal=True)


@pytest.mark.parametrize(("share", "batch"), [(1, 3), (3, 1), (8, 2), (16, 1)])
def test_shared_heads(device, share, batch):
    check(device, 2 * share, 1, batch=batch, blocks=2, exact=5)


@pytest.mark.parametrize(("nbits", "queries"), [(2, 2), (3, 9), (4, 33), (8, 70)])
def test_chunk_queries(device, nbits, queries):
    formats = {"key_nbits": nbits, "value_nbits": nbits, "head_dim": 16}
    check(device, 3, queries, kv_heads=1, blocks=3, exact=queries + 11, causal=True, **formats)


def test_causal_within_a_chunk_longer_than_the_exact_tokens(device):
    """The first queries then must not see the newest packed tokens."""
    check(device, 2, 40, kv_heads=1, exact=7, causal=True)


@pytest.mark.parametrize("group_size", [8, 24, 64])
@pytest.mark.parametrize("nbits", WIDTHS)
def test_group_sizes(device, group_size, nbits):
    check(device, 2, 1, kv_heads=1, key_nbits=nbits, value_nbits=nbits, group_size=group_size, head_dim=40, blocks=2)


@pytest.mark.parametrize("axes", [("token", "token"), ("channel", "channel"), ("token", "channel")])
@pytest.mark.parametrize(("head_dim", "nbits"), [(32, (4, 2)), (40, (3, 8))])
def test_other_axes(device, axes, head_dim, nbits):
    formats = {"key_nbits": nbits[0], "value_nbits": nbits[1], "key_axis": axes[0], "value_axis": axes[1]}
    check(device, 2, 2, kv_heads=1, head_dim=head_dim, blocks=2, causal=True, **formats)


@pytest.mark.parametrize("nbits", WIDTHS)
@pytest.mark.parametrize("key_axis", ["channel", "token"])
def test_codebooks(device, nbits, key_axis):
    codebook = tuple(torch.linspace(-1, 1, 2**nbits).pow(3).tolist())
    check(device, 2, 1, kv_heads=1, key_nbits=nbits, value_nbits=nbits, codebook=codebook, key_axis=key_axis, blocks=2)


@pytest.mark.parametrize(("exact", "sink", "blocks"), [(1, 0, 1), (33, 40, 9), (200, 0, 1), (1, 4, 2)])
def test_lengths_of_segments(device, exact, sink, blocks):
    check(device, 2, 3, kv_heads=1, head_dim=16, blocks=blocks, exact=exact, sink=sink, causal=True)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(3, 1), (1, 4)])
def test_masks(device, dtype, shape):
    view = {"batch": 3, "head_dim": 16, "blocks": 3, "exact": 21}
    mask = torch.rand(*shape, 2, 3 * 32 + 25) < 0.7
    if dtype != torch.bool:
        mask = torch.where(mask, torch.randn(mask.shape), FINITE if dtype == torch.float32 else -torch.inf).to(dtype)
    check(device, 4, 2, mask.to(device), **view)


@pytest.mark.parametrize("additive", [True, False])
def test_rows_that_attend_to_nothing(device, additive):
    view = {"batch": 2, "head_dim": 16, "blocks": 5}
    mask = torch.ones(2, 1, 3, 5 * 32 + 41, dtype=torch.bool)
    mask[1, :, 1] = False
    # and one that sees nothing but its last token
    mask[0, :, 2, :-1] = False
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    output, lse = check(device, 4, 3, mask.to(device), **view)
    assert (output[1, :, 1] == 0).all()
    assert (lse[1, :, 1] == -torch.inf).all()
    assert lse[0].isfinite().all()


@pytest.mark.parametrize("processors", [1, 100])
def test_context_is_split_over_processors(device, processors):
    """A few programs take all tiles, or each takes the fewest that are worth it."""
    check(device, 2, 1, kv_heads=1, head_dim=16, blocks=25, kernels=TritonKernels(processors))


def test_views_with_room_to_grow_and_strided_tensors(device):
    view = make_view(batch=2, head_dim=32, blocks=6, grown=True, strided=True, device=device)
    assert not view.keys.codes.is_contiguous()
    assert not view.exact_keys.is_contiguous()
    query = torch.randn(2, 2, 4, 32, device=device).transpose(1, 2)
    mask = (torch.rand(2, 1, view.length, 2, device=device) < 0.7).transpose(2, 3)
    check_attend(KERNELS, view, query, mask)


def test_large_scores(device):
    """Scores of several hundred: only the largest ones matter, and nothing overflows."""
    check(device, 4, 1, head_dim=64, scale=12.0)
