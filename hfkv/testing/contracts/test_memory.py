"""Honest bytes: what a cache says that it stores is all that it keeps alive."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from hfkv.cache.layer import KVLayer, StateShape
from hfkv.cache.memory import memory, tensor_bytes
from hfkv.testing.cases import CacheCase
from hfkv.testing.matrix import every_family, families
from hfkv.testing.models import NEW_TOKENS, PADDING, PROMPT_LENGTH, decoder_cache
from hfkv.testing.oracle import Judge

LENGTH = PROMPT_LENGTH + NEW_TOKENS


@pytest.mark.parametrize("tokens", [1, PROMPT_LENGTH, LENGTH])
@every_family
def test_stored_bytes_are_all_tensors_that_can_be_reached(hfkv_case: CacheCase, family: str, tokens: int) -> None:
    """The report adds up: layers, segments, and every tensor behind any attribute."""
    judge = Judge(hfkv_case, family, "sdpa")
    ids = judge.tiny.prompt(rows=3, length=tokens)
    if tokens > 1 and not judge.tiny.is_encoder_decoder:
        ids[0, :9] = PADDING
    cache = judge.filled(ids)
    report = memory(cache)
    assert report.stored_bytes == sum(tensor_bytes(cache).values())
    shared = sum(tensor_bytes(decoder_cache(cache).padding).values())
    assert report.shared_bytes == shared, "a tensor is counted in several layers, or in none"
    # what is known of the padding belongs to all layers, and what an earlier layer stores is that layer's
    earlier = set(tensor_bytes(decoder_cache(cache).padding))
    for index, layer in enumerate(decoder_cache(cache).layers):
        own = tensor_bytes(layer).keys() - earlier
        earlier |= own
        if not isinstance(layer, KVLayer):
            continue
        segments = dict(layer.segments())
        reached = sum(size for address, size in tensor_bytes(layer).items() if address in own)
        assert sum(segments.values()) == reached, (
            f"layer {index} of {hfkv_case} names segments {segments}, and {reached} bytes can be reached from it: "
            "segments() must name everything that is stored, room to grow included"
        )
    plain = judge.tiny.plain_cache()
    judge.tiny.feed(plain, judge.tiny.prompt(rows=3, length=tokens))
    for index, (layer, whole) in enumerate(zip(report.layers, memory(plain).layers, strict=True)):
        # fewer tokens are kept where the technique forgets, and by sliding layers in either cache
        kept = whole.elements * layer.tokens // max(whole.tokens, 1)
        assert layer.elements == kept, f"layer {index}: elements() must count the keys and values of every token kept"


@pytest.mark.parametrize("tokens", [1, PROMPT_LENGTH, LENGTH])
@families(["llama"])
def test_planned_bytes_are_those_of_the_cache(hfkv_case: CacheCase, family: str, tokens: int) -> None:
    """What a plan is made with is what a prompt of that length takes, to the byte; or it says that it does not know."""
    judge = Judge(hfkv_case, family, "sdpa")
    cache, plain = judge.cache(), judge.tiny.plain_cache()
    for filled in (cache, plain):
        judge.tiny.feed(filled, judge.tiny.prompt(rows=3, length=tokens))
    pairs: list[tuple[Any, Any]] = list(zip(cache.layers, plain.layers, strict=True))
    for layer, reference in pairs:
        rows, heads, _, key_dim = reference.keys.shape
        shape = StateShape(rows, heads, key_dim, reference.values.shape[3], reference.keys.dtype.itemsize)
        stored = sum(size for _, size in layer.segments())
        try:
            planned = layer.planned_bytes(tokens, shape)
        except NotImplementedError:
            continue
        assert planned == stored, f"{hfkv_case}: planned_bytes() says {planned}, and segments() {stored}"


@families(["llama"])
def test_nothing_is_kept_outside_the_cache(hfkv_case: CacheCase, family: str) -> None:
    """Tensors in a module, a class or a closure would be alive too, and unseen by the report."""
    judge = Judge(hfkv_case, family, "sdpa")
    ids = judge.tiny.prompt(rows=2, length=LENGTH)
    # what is made once for the process (tables, kernels) is made before the count
    judge.filled(ids)
    # the tensors themselves are held, so that no new one takes the address of an old one
    before = _alive()
    cache = judge.filled(ids)
    stored = tensor_bytes(cache)
    hidden = {
        address: tensor.untyped_storage().nbytes()
        for address, tensor in _alive().items()
        if address not in before and address not in stored
    }
    assert not hidden, (
        f"{hfkv_case}: {sum(hidden.values())} bytes of {len(hidden)} tensors stay alive beside the "
        f"{sum(stored.values())} bytes that can be reached from the cache"
    )


def _alive() -> dict[int, torch.Tensor]:
    """Every tensor of the process, one for each storage, by address."""
    gc.collect()
    # by type(), for isinstance() asks proxies of other libraries, and they import what they stand for
    found = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return {
        tensor.untyped_storage().data_ptr(): tensor
        for tensor in found
        if tensor.device.type != "meta" and tensor.layout is torch.strided
    }


@families(["llama"])
def test_a_lossy_cache_is_smaller(hfkv_case: CacheCase, family: str) -> None:
    """What costs quality saves bytes: fewer than the plain cache's for a prompt of a few hundred tokens."""
    if hfkv_case.spec.lossless:
        pytest.skip(f"{hfkv_case.spec.name} is lossless: it may cost what it likes")
    judge = Judge(hfkv_case, family, "sdpa")
    ids = judge.tiny.prompt(length=400)
    cache, plain = judge.cache(), judge.tiny.plain_cache()
    for each in (cache, plain):
        judge.tiny.feed(each, ids)
    ours, theirs = memory(cache).stored_bytes, memory(plain).stored_bytes
    assert ours < theirs, f"{hfkv_case} is lossy and stores {ours} bytes where the plain cache stores {theirs}"
