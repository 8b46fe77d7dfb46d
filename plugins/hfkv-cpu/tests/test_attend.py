"""`attend` against the dequantized reference, over formats, shapes, masks, instruction sets and threads."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from hfkv.cache import KVView
from hfkv.cache.exact import ExactStore
from hfkv.kernels import REFERENCE
from hfkv.testing.packing import poisoned
from hfkv_cpu.kernels import CpuKernels
from hfkv_cpu.testing import FINITE, ISAS, WIDTHS, make_view

# against the reference in float64-like precision: float32 sums, and the rounding of the output for half precision
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def check(view, query, mask=None, *, causal=False, isa=None, scale=None, tolerance=None):
    """Run both, with fresh allocations poisoned by NaN, and compare outputs and log-sum-exps."""
    tolerance = tolerance or TOLERANCE[query.dtype]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    with poisoned():
        output, lse = CpuKernels(isa).attend(query, view, mask, scale, causal)
    expected, expected_lse = REFERENCE.attend(query.float(), view, mask, scale, causal)
    assert output.dtype == query.dtype
    assert output.shape == expected.shape
    error = (output.float() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error < tolerance, error
    # a dtype narrower than float32 rounds each number by itself
    worst = (output.float() - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    assert worst < tolerance, worst
    torch.testing.assert_close(lse, expected_lse, rtol=tolerance, atol=tolerance)
    return output, lse


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("key_nbits", "value_nbits"), [(w, w) for w in WIDTHS] + [(4, 2), (2, 8)])
def test_decode_step(isa, dtype, key_nbits, value_nbits):
    view = make_view(key_nbits=key_nbits, value_nbits=value_nbits, dtype=dtype)
    check(view, torch.randn(1, 8, 1, 128).to(dtype), isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("nbits", WIDTHS)
@pytest.mark.parametrize("head_dim", [20, 64, 80, 128, 256])
def test_head_dims(isa, nbits, head_dim):
    view = make_view(key_nbits=nbits, value_nbits=nbits, head_dim=head_dim, blocks=5)
    check(view, torch.randn(1, 6, 1, head_dim), isa=isa)
    check(view, torch.randn(1, 6, 3, head_dim), isa=isa, causal=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_and_values_of_different_width(isa, dtype):
    view = make_view(head_dim=96, value_head_dim=40, dtype=dtype)
    check(view, torch.randn(1, 4, 2, 96).to(dtype), isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("share", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("queries", [1, 5])
def test_shared_heads(isa, dtype, share, batch, queries):
    view = make_view(batch=batch, kv_heads=2, head_dim=64, blocks=6, dtype=dtype)
    check(view, torch.randn(batch, 2 * share, queries, 64).to(dtype), causal=True, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nbits", WIDTHS)
@pytest.mark.parametrize("queries", [16, 33, 150])
def test_chunk_queries(isa, dtype, nbits, queries):
    view = make_view(key_nbits=nbits, value_nbits=nbits, head_dim=64, blocks=7, exact=queries + 11, dtype=dtype)
    check(view, torch.randn(1, 6, queries, 64).to(dtype), causal=True, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 8, 10, 11, 16, 17, 22, 43, 64, 65])
def test_rows_of_a_unit(isa, dtype, rows):
    """Rows share tiles, some of which are not full; and steps of four blocks leave a half chunk of values."""
    view = make_view(kv_heads=1, head_dim=96, blocks=7, exact=rows + 3, dtype=dtype)
    check(view, torch.randn(1, 1, rows, 96).to(dtype), causal=True, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
def test_scales_that_differ_among_blocks(isa):
    """A query becomes integers by the largest scales of several blocks: the others keep float32's precision."""
    view = make_view(head_dim=64, blocks=8)
    view.keys.scale.mul_(torch.linspace(0.02, 1, 8).view(1, 1, 8, 1))
    check(view, torch.randn(1, 8, 1, 64), isa=isa)


@pytest.mark.parametrize("isa", ISAS)
def test_a_chunk_whose_last_rows_are_few(isa):
    """Rows are shared out evenly, 64 at most: here the last part has one, and room for 64."""
    view = make_view(kv_heads=1, head_dim=64, blocks=2, exact=5)
    check(view, torch.randn(1, 1, 4033, 64), isa=isa)


@pytest.mark.parametrize("group_size", [8, 24, 32, 64, 136, 256])
@pytest.mark.parametrize("key_axis", ["channel", "token"])
@pytest.mark.parametrize("value_axis", ["channel", "token"])
@pytest.mark.parametrize(("head_dim", "value_head_dim"), [(64, 64), (80, 40), (18, 20)])
def test_chunks_of_bfloat16(group_size, key_axis, value_axis, head_dim, value_head_dim):
    """Rows enough for tiles of bfloat16, where there are any: every geometry, and numbers that fill no tile."""
    view = make_view(
        group_size=group_size,
        key_axis=key_axis,
        value_axis=value_axis,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        blocks=3,
        exact=141,
        dtype=torch.bfloat16,
        strided=True,
    )
    check(view, torch.randn(1, 6, 35, head_dim).bfloat16(), causal=True)


@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_of_bfloat16_with_masks(threads):
    """A row that sees nothing in one part of the context, or nowhere; batches, and parts that threads share."""
    view = make_view(batch=2, head_dim=64, blocks=40, grown=True, dtype=torch.bfloat16)
    mask = torch.rand(2, 1, 21, view.length) < 0.7
    mask[0, :, 3, : view.length // 2] = False
    mask[1, :, 7] = False
    query = torch.randn(2, 4, 21, 64).bfloat16()
    with with_threads(threads):
        output, _ = check(view, query, mask)
        check(view, query, torch.where(mask, torch.randn(mask.shape), -torch.inf))
    assert (output[1, :, 7] == 0).all()


def test_copies_of_a_view_are_read_where_they_are():
    """The addresses of blocks and of exact tokens are kept with them, and no copy takes them along."""
    view = make_view(head_dim=64)
    query = torch.randn(1, 4, 1, 64)
    expected, _ = check(view, query)
    copies = copy.deepcopy(view), pickle.loads(pickle.dumps(view))
    for blocks in (view.keys, view.values):
        blocks.scale.zero_()
    view.exact.keys.zero_()
    view.exact.values.zero_()
    for other in copies:
        output, _ = check(other, query)
        assert torch.equal(output, expected)


def test_views_of_a_store_stay_what_they_were():
    """Tokens are written into the same buffers or lead to new ones: what was handed out before sees neither."""
    packed = make_view(head_dim=64)
    store = ExactStore(packed.exact_keys[:, :, :9], packed.exact_values[:, :, :9])
    store.cut(0, 0, room=12)
    query = torch.randn(1, 4, 1, 64)
    seen = []
    for _ in range(6):
        view = KVView(store.buffers, store.length, packed.sink, packed.keys, packed.values)
        seen.append((view, check(view, query)[0]))
        # in place, then joined to a longer run
        store.append(
            torch.randn(1, packed.keys.codes.shape[1], 1, 64), torch.randn(1, packed.keys.codes.shape[1], 1, 64)
        )
    store.cut(4, 8, room=12)
    cut = KVView(store.buffers, store.length, packed.sink, packed.keys, packed.values)
    check(cut, query)
    for view, expected in seen:
        assert torch.equal(check(view, query)[0], expected)
    assert len({view.exact for view, _ in seen} | {cut.exact}) > 2


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group_size", [8, 16, 24, 32, 64, 256])
@pytest.mark.parametrize("nbits", WIDTHS)
def test_group_sizes(isa, group_size, nbits):
    view = make_view(key_nbits=nbits, value_nbits=nbits, group_size=group_size, head_dim=80, blocks=3)
    check(view, torch.randn(1, 4, 1, 80), isa=isa)
    check(view, torch.randn(1, 4, 20, 80), isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("key_axis", ["channel", "token"])
@pytest.mark.parametrize("value_axis", ["channel", "token"])
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("queries", [1, 20])
def test_axes(isa, key_axis, value_axis, head_dim, queries):
    view = make_view(key_axis=key_axis, value_axis=value_axis, head_dim=head_dim, blocks=5)
    check(view, torch.randn(1, 4, queries, head_dim), isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("nbits", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries", [1, 20])
def test_codebooks(isa, nbits, dtype, queries):
    codebook = tuple(torch.linspace(-1, 1, 2**nbits).pow(3).tolist())
    view = make_view(key_nbits=nbits, value_nbits=nbits, codebook=codebook, head_dim=64, blocks=5, dtype=dtype)
    check(view, torch.randn(1, 4, queries, 64).to(dtype), isa=isa)


def make_halves(**changes):
    """Hierarchical codes of 8 bits, as they are verified and as they are drafted from."""
    view = make_view(key_nbits=8, value_nbits=8, hierarchical=True, **changes)
    return view, view.coarse()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [20, 64, 80, 128])
@pytest.mark.parametrize("queries", [1, 5, 20])
def test_hierarchical_codes(isa, dtype, head_dim, queries):
    for view in make_halves(batch=2, head_dim=head_dim, blocks=6, grown=True, dtype=dtype):
        check(view, torch.randn(2, 6, queries, head_dim).to(dtype), causal=True, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("key_axis", ["channel", "token"])
@pytest.mark.parametrize("value_axis", ["channel", "token"])
@pytest.mark.parametrize("group_size", [8, 24, 32, 64])
def test_hierarchical_geometries(isa, key_axis, value_axis, group_size):
    for view in make_halves(key_axis=key_axis, value_axis=value_axis, group_size=group_size, head_dim=80, blocks=3):
        check(view, torch.randn(1, 4, 1, 80), isa=isa)
        check(view, torch.randn(1, 4, 20, 80), isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("queries", [1, 20])
def test_hierarchical_codes_are_those_of_8_bits_to_the_bit(isa, queries):
    """Where the halves of a code lie changes nothing that is computed from it."""
    query = torch.randn(1, 8, queries, 128)
    one, other = (
        CpuKernels(isa).attend(query, make_view(key_nbits=8, value_nbits=8, hierarchical=halves), None, 0.1, True)
        for halves in (True, False)
    )
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("isa", ISAS)
def test_hierarchical_context_is_split_over_threads(isa):
    for view in make_halves(kv_heads=1, head_dim=64, blocks=70):
        with with_threads(2):
            check(view, torch.randn(1, 3, 1, 64), isa=isa)


@pytest.mark.parametrize("exact", [1, 3, 4, 5, 33, 131, 400])
@pytest.mark.parametrize("sink", [0, 4, 40])
@pytest.mark.parametrize("blocks", [1, 4, 9])
def test_lengths_of_segments(exact, sink, blocks):
    view = make_view(head_dim=64, blocks=blocks, exact=exact, sink=sink)
    check(view, torch.randn(1, 4, 1, 64))
    check(view, torch.randn(1, 4, 7, 64), causal=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (3, 6), (1, 6)])
@pytest.mark.parametrize("queries", [1, 4])
def test_masks(isa, dtype, shape, queries):
    view = make_view(batch=3, head_dim=64, blocks=5, exact=21, sink=4)
    mask = torch.rand(*shape, queries, view.length) < 0.7
    if dtype != torch.bool:
        mask = torch.where(mask, torch.randn(mask.shape), FINITE if dtype == torch.float32 else -torch.inf).to(dtype)
    check(view, torch.randn(3, 6, queries, 64), mask, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("additive", [True, False])
def test_rows_that_attend_to_nothing(isa, threads, additive):
    view = make_view(batch=2, head_dim=64, blocks=40)
    mask = torch.ones(2, 1, 3, view.length, dtype=torch.bool)
    mask[1, :, 1] = False
    # and one that sees nothing but its last token
    mask[0, :, 2, :-1] = False
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    query = torch.randn(2, 4, 3, 64)
    with with_threads(threads):
        output, lse = check(view, query, mask, isa=isa)
    assert (output[1, :, 1] == 0).all()
    assert (lse[1, :, 1] == -torch.inf).all()


class with_threads:
    def __init__(self, threads):
        self.threads = threads

    def __enter__(self):
        self.before = torch.get_num_threads()
        torch.set_num_threads(self.threads)

    def __exit__(self, *error):
        torch.set_num_threads(self.before)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_context_is_split_over_threads(isa, threads, kv_heads):
    view = make_view(kv_heads=kv_heads, head_dim=64, blocks=70)
    with with_threads(threads):
        check(view, torch.randn(1, 3 * kv_heads, 1, 64), isa=isa)


def test_threads_give_one_result():
    """Who does the work changes the order of sums, and nothing else."""
    view = make_view(kv_heads=1, head_dim=64, blocks=70)
    query = torch.randn(1, 4, 1, 64)
    results = []
    for threads in (1, 2):
        with with_threads(threads):
            results.append(CpuKernels().attend(query, view, None, 0.1, False))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_views_with_room_to_grow_and_strided_tensors(isa):
    view = make_view(batch=3, head_dim=64, blocks=6, grown=True, strided=True)
    assert not view.keys.codes.is_contiguous()
    assert not view.exact_keys.is_contiguous()
    query = torch.randn(3, 2, 6, 64).transpose(1, 2)
    mask = (torch.rand(3, 1, view.length, 2) < 0.7).transpose(2, 3)
    check(view, query, mask, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outlier_channels(isa, dtype):
    """A few key channels with a hundred times the range of the others, as models have them."""
    view = make_view(head_dim=128, dtype=dtype, outliers=100.0)
    check(view, torch.randn(1, 8, 1, 128).to(dtype), scale=0.01, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries", [1, 20])
def test_large_scores(isa, dtype, queries):
    """Scores of several hundred: only the largest ones matter, and nothing overflows."""
    view = make_view(head_dim=64, dtype=dtype)
    # float32 rounds such scores by 1e-5, and a weight follows its score
    tolerance = 1e-4 if dtype == torch.float32 else None
    check(view, (torch.randn(1, 4, queries, 64) * 4).to(dtype), scale=3.0, isa=isa, tolerance=tolerance)


def test_constant_blocks():
    """Groups without a range have the smallest scale that float16 can hold."""
    view = make_view(head_dim=64, constant=True)
    check(view, torch.randn(1, 4, 1, 64))
    check(view, torch.randn(1, 4, 1, 64).bfloat16())
