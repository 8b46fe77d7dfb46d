"""8-bit codes in halves: nothing but their place is changed, and the upper half is a 4-bit view."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from transformers import LlamaConfig

import hfkv
from hfkv import kernels, registry
from hfkv.cache import KVHandle, KVQuantizer, PackedFormat, coarsely

HEADS = 2
# a group of 8 along 20 channels: three runs, the last one padded
SHAPES = [(32, 64), (8, 20)]
BACKENDS = [
    pytest.param(
        name, marks=pytest.mark.skipif(bool(registry.unmet(spec)), reason=f"{name} needs {registry.unmet(spec)}")
    )
    for name, spec in registry.manager().specs(hfkv.KVQuantizerSpec).items()
    if 8 in spec.nbits
]


def states(tokens, head_dim, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randn(head_dim, generator=generator)
    return torch.randn(batch, HEADS, tokens, head_dim, generator=generator) + levels


def config(head_dim):
    return LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        hidden_size=HEADS * head_dim,
        head_dim=head_dim,
    )


def caches(head_dim, **options):
    """The same cache with whole codes and with halves."""
    options = {"nbits": 8, "group_size": 8, "residual_length": 8, "sink_length": 2, **options}
    return [hfkv.make_cache("kivi", config(head_dim), **options, hierarchical=halves) for halves in (False, True)]


def feed(cache, keys, values):
    """A prompt, then token by token; what attention is given last."""
    head, *tokens = (keys.shape[2] - 9, *[1] * 9)
    for key, value in zip(keys.split([head, *tokens], 2), values.split([head, *tokens], 2), strict=True):
        handles = cache.update(key, value, 0)
    return handles


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize(("group_size", "head_dim"), SHAPES)
def test_codes_are_those_of_8_bits_and_their_upper_halves_a_view(backend, axis, group_size, head_dim):
    quantizer = registry.find(hfkv.KVQuantizerSpec, backend, "backend")()
    whole, halves = (
        kernels.REFERENCE.pack(
            states(3 * group_size, head_dim),
            PackedFormat(8, axis, group_size, head_dim, hierarchical=hierarchical),
            quantizer,
        )
        for hierarchical in (False, True)
    )
    exact = kernels.REFERENCE.unpack(halves, torch.float32)
    assert torch.equal(exact, kernels.REFERENCE.unpack(whole, torch.float32))
    for one, other in ((halves.codes, whole.codes), (halves.scale, whole.scale), (halves.offset, whole.offset)):
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
    view = halves.upper_half
    assert view.codes.untyped_storage().data_ptr() == halves.codes.untyped_storage().data_ptr()
    assert view.codes.numel() == halves.codes.numel() // 2
    # a cell of 4 bits is 16 steps wide, and its middle stands for all of it
    error = (kernels.REFERENCE.unpack(view, torch.float32) - exact).abs()
    nothing = dataclasses.replace(view, codes=torch.zeros_like(view.codes), offset=torch.zeros_like(view.offset))
    half_a_cell = kernels.REFERENCE.unpack(nothing, torch.float32)
    assert (error <= half_a_cell + 1e-6).all()
    # evenly spread, it is half of that; the ends of each group's range are as far off as can be
    assert 0.4 < error.mean() / half_a_cell.mean() < 0.7


@pytest.mark.parametrize("head_dim", [64, 20])
@pytest.mark.parametrize("axes", [{}, {"key_axis": "token", "value_axis": "channel"}], ids=["kivi", "other axes"])
def test_cache_is_the_8_bit_cache_to_the_bit_and_to_the_byte(head_dim, axes):
    keys, values = states(60, head_dim), states(60, head_dim, seed=1)
    pair = caches(head_dim, **axes)
    plain, ours = (feed(cache, keys, values) for cache in pair)
    for one, other in zip(plain, ours, strict=True):
        assert isinstance(other, KVHandle)
        assert torch.equal(one.dense(), other.dense())
    reports = [hfkv.memory(cache) for cache in pair]
    assert reports[0] == reports[1]
    assert reports[1].packed_bytes > 0


STATES = {
    "as it is": lambda cache: cache,
    "copied": copy.deepcopy,
    "pickled": lambda cache: pickle.loads(pickle.dumps(cache)),
    "cropped into a block": lambda cache: cache.crop(-29),
    "beams": lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])),
    "rows that left": lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
    "rows repeated": lambda cache: cache.batch_repeat_interleave(2),
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_every_state_is_that_of_the_8_bit_cache(change):
    keys, values = states(60, 16, batch=3), states(60, 16, batch=3, seed=1)
    results = []
    for cache in caches(16):
        feed(cache, keys, values)
        cache = change(cache) or cache
        more = states(20, 16, batch=cache.layers[0].batch_size, seed=2)
        results.append((cache, feed(cache, more, more)))
    (plain, expected), (ours, actual) = results
    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one.dense(), other.dense())
    assert hfkv.memory(plain) == hfkv.memory(ours)
    with coarsely(ours.layers):
        view = ours.update(more[:, :, :1], more[:, :, :1], 0)[0]
    assert view.snapshot.keys.format.nbits == 4
    assert 0 < (view.dense() - ours.layers[0].keys).abs().max() < 0.3


def test_coarse_view_is_given_while_drafting_alone_and_keeps_exact_tokens():
    (_, cache), keys = caches(16), states(60, 16)
    whole = feed(cache, keys, keys)[0]
    (layer,) = cache.layers
    token = keys[:, :, :1]
    with coarsely(cache.layers):
        view = cache.update(token, token, 0)[0]
        # what is stored is what it was, whoever asks for it
        assert torch.equal(layer.keys[:, :, :60], whole.dense())
    packed = slice(2, 2 + view.snapshot.keys.length)
    same = (view.dense() == layer.keys).all(dim=-1).all(dim=1)[0]
    assert same[: packed.start].all()
    assert same[packed.stop :].all()
    assert not same[packed].any()
    after = cache.update(token, token, 0)[0]
    assert after.snapshot.keys.format.nbits == 8


@pytest.mark.parametrize("options", [{"window_length": 24}, {"window_length": 24, "positions": "absolute"}], ids=str)
def test_windowed_cache_is_that_of_8_bits(options):
    keys = states(60, 16)
    query = states(1, 16, seed=3)
    results = []
    for cache in caches(16, **options):
        handle = feed(cache, keys, keys)[0]
        results.append((handle.snapshot.body.dense("keys"), hfkv.memory(cache)))
        with coarsely(cache.layers):
            body = cache.update(query, query, 0)[0].snapshot.body
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert body.keys.format.nbits == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hierarchical": True}, "keys have 4 bits and values 4: set nbits=8"),
        ({"hierarchical": True, "nbits": 8, "value_nbits": 4}, "keys have 8 bits and values 4"),
        ({"hierarchical": "yes", "nbits": 8}, "hierarchical='yes' is not supported"),
        ({"nbits": 8, "hierarchical": True, "layers": {"0": {"nbits": 2}}}, "keys have 2 bits"),
    ],
    ids=str,
)
def test_what_cannot_be_hierarchical_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        hfkv.make_cache("kivi", config(16), **options)


class Cubic(KVQuantizer):
    """Levels that are denser around zero."""

    name = "cubic"

    def codebook(self, nbits):
        return tuple(torch.linspace(-1, 1, 2**nbits).pow(3).tolist())

    def quantize(self, groups, nbits):
        raise NotImplementedError


class Plugin:
    @hfkv.hookimpl
    def hfkv_kv_quantizers(self):
        yield hfkv.KVQuantizerSpec(name="cubic", summary="denser around zero", load=f"{__name__}:Cubic")


def test_codebook_is_refused():
    hfkv.register(Plugin(), "cubic")
    try:
        with pytest.raises(ValueError, match="backend='cubic' stand for levels of a codebook"):
            hfkv.make_cache("kivi", config(16), nbits=8, hierarchical=True, backend="cubic")
    finally:
        hfkv.unregister("cubic")
    for nbits, codebook in ((4, None), (8, Cubic().codebook(8))):
        with pytest.raises(ValueError, match="hierarchical codes are the 8 bits of a uniform grid"):
            PackedFormat(nbits, "token", 32, 64, codebook, hierarchical=True)
