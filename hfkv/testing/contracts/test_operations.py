"""What transformers does to a cache between forwards. A cache declares what it can do; both answers are tested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from hfkv.cache.layer import KVLayer
from hfkv.cache.memory import tensor_bytes
from hfkv.testing.cases import CacheCase
from hfkv.testing.matrix import every_attention, every_family, families
from hfkv.testing.models import NEW_TOKENS, PADDING, PROMPT_LENGTH, decoder_cache
from hfkv.testing.oracle import Judge

LENGTH = PROMPT_LENGTH + NEW_TOKENS
MORE = 12


@pytest.mark.parametrize("remove", [0, 1, 6, NEW_TOKENS + 1, LENGTH - 3, LENGTH - 1, LENGTH])
@every_family
@every_attention
def test_crop(hfkv_case: CacheCase, family: str, attention: str, remove: int) -> None:
    """The newest tokens are taken back, from none to all, and others follow."""
    judge = Judge(hfkv_case, family, attention)
    tiny = judge.tiny
    ids, other = tiny.prompt(rows=2, length=LENGTH), tiny.prompt(rows=2, length=LENGTH + MORE, seed=2)
    kept = LENGTH - remove
    with judge.capability("crop"):
        cache = judge.filled(ids[:, :kept])
        # as `generate` does: sliding layers forget what they would have to restore unless they are told, and then
        # expect a crop after every forward
        cache.activate_past_recording()
        if remove:
            tiny.feed(cache, ids, chunk=None if any(decoder_cache(cache).is_sliding) else 1)
        cache.crop(-remove)
        assert cache.get_seq_length() == kept
        sequences = torch.cat([ids[:, :kept], other[:, kept : kept + MORE]], dim=1)
        parts = []
        for length in range(kept + 1, kept + MORE + 1):
            parts.append(tiny.feed(cache, sequences[:, :length]))
            cache.crop(0)
        actual, expected = torch.cat(parts, dim=1), judge.logits(sequences)[:, kept:]
        hint = "crop() leaves removed tokens in some of what is stored, or takes more than it should"
        judge.faithful(actual, expected, f"after crop(-{remove}) of {LENGTH} tokens", hint)


@families(["llama"])
def test_crop_takes_no_length(hfkv_case: CacheCase, family: str) -> None:
    """A positive number, once the length to keep, is refused on every release of transformers."""
    judge = Judge(hfkv_case, family, "sdpa")
    with judge.capability("crop"):
        cache = judge.filled(judge.tiny.prompt())
        with pytest.raises(ValueError, match="positive"):
            cache.crop(3)


def _rows(judge: Judge) -> torch.Tensor:
    """Three sequences of different lengths, padded on the left where the model has positions for it."""
    ids = judge.tiny.prompt(rows=3, length=LENGTH + MORE)
    if not judge.tiny.is_encoder_decoder:
        ids[1, :7] = PADDING
        ids[2, : PROMPT_LENGTH - 3] = PADDING
    return ids


def _check_rows(
    judge: Judge, operation: Callable[[Any], None], moved: Callable[[torch.Tensor], torch.Tensor], what: str
) -> None:
    """Decoding after an operation on rows is the same operation on what is decoded without it.

    The operation comes early and is followed by more tokens than a block has, then comes again.
    """
    tiny = judge.tiny
    ids = _rows(judge)
    expected = tiny.feed(judge.filled(ids[:, : LENGTH - 8]), ids, chunk=1)
    cache = judge.filled(ids[:, :PROMPT_LENGTH])
    ids = moved(ids)
    operation(cache)
    tiny.feed(cache, ids[:, : LENGTH - 8], chunk=1)
    ids = moved(ids)
    operation(cache)
    actual = tiny.feed(cache, ids, chunk=1)
    hint = "some tensor of the layer, or what it knows of the padding, keeps its old rows (KVLayer.map_rows)"
    judge.same(actual, moved(moved(expected)), what, "those of the same rows left in place", hint)


@every_family
@every_attention
def test_reorder(hfkv_case: CacheCase, family: str, attention: str) -> None:
    """Rows change places, and one takes the place of another."""
    judge = Judge(hfkv_case, family, attention)
    order = torch.tensor([2, 0, 0])
    with judge.capability("reorder"):
        _check_rows(judge, lambda cache: cache.reorder_cache(order), lambda rows: rows[order], "after reorder_cache")


@every_family
@every_attention
def test_select(hfkv_case: CacheCase, family: str, attention: str) -> None:
    """Rows leave the batch, the longest among them."""
    judge = Judge(hfkv_case, family, attention)
    # the first time of three rows, then of two
    chosen = {3: torch.tensor([2, 1]), 2: torch.tensor([1])}

    def operate(cache: Any) -> None:
        cache.batch_select_indices(chosen[decoder_cache(cache).batch_size])

    with judge.capability("select"):
        _check_rows(judge, operate, lambda rows: rows[chosen[len(rows)]], "after batch_select_indices")


@every_family
@every_attention
def test_repeat(hfkv_case: CacheCase, family: str, attention: str) -> None:
    """Every row becomes two, which go on together."""
    judge = Judge(hfkv_case, family, attention)
    with judge.capability("select"):
        _check_rows(
            judge,
            lambda cache: cache.batch_repeat_interleave(2),
            lambda rows: rows.repeat_interleave(2, dim=0),
            "after batch_repeat_interleave",
        )


@every_family
@every_attention
def test_reset(hfkv_case: CacheCase, family: str, attention: str) -> None:
    """A cache that was reset is a new one, padding of the last batch forgotten."""
    judge = Judge(hfkv_case, family, attention)
    tiny = judge.tiny
    cache = judge.filled(_rows(judge))
    if judge.tiny.is_encoder_decoder or not all(isinstance(layer, KVLayer) for layer in cache.layers):
        _skip_unless_transformers_resets(judge)
    cache.reset()
    assert cache.get_seq_length() == 0
    ids = tiny.prompt(rows=2, length=LENGTH, seed=6)
    actual = tiny.feed(cache, ids, chunk=9)
    expected = tiny.feed(judge.cache(), ids, chunk=9)
    judge.same(actual, expected, "after reset", "those of a new cache", "reset() leaves tokens, a mask or a state")


def _skip_unless_transformers_resets(judge: Judge) -> None:
    """Older releases fill their own layers with zeros instead of emptying them."""
    plain = judge.tiny.plain_cache()
    judge.tiny.feed(plain, judge.tiny.prompt(rows=3))
    plain.reset()
    try:
        judge.tiny.logits(judge.tiny.prompt(rows=2, length=LENGTH), plain)
    except RuntimeError as error:
        pytest.skip(f"transformers {transformers.__version__} does not empty its own layers: {error}")


@every_family
@every_attention
def test_offload_and_prefetch(hfkv_case: CacheCase, family: str, attention: str) -> None:
    """Layers go to the CPU and come back between forwards."""
    judge = Judge(hfkv_case, family, attention)
    ids = judge.tiny.prompt(rows=2, length=LENGTH)
    with judge.capability("offload"):
        cache = judge.filled(ids[:, :PROMPT_LENGTH])
        parts = []
        for length in range(PROMPT_LENGTH + 1, LENGTH + 1):
            for index, layer in enumerate(decoder_cache(cache).layers):
                decoder_cache(cache).offload(index)
                layer.prefetch()
            parts.append(judge.tiny.feed(cache, ids[:, :length]))
        expected = judge.tiny.feed(judge.filled(ids[:, :PROMPT_LENGTH]), ids, chunk=1)
        judge.same(torch.cat(parts, dim=1), expected, "with layers offloaded", "those of layers that stay")


@families(["llama"])
@pytest.mark.parametrize("tokens", [5, LENGTH])
def test_offload_reaches_every_tensor(hfkv_case: CacheCase, family: str, tokens: int) -> None:
    """What `move` leaves behind would stay on the accelerator; the meta device shows it on any machine."""
    judge = Judge(hfkv_case, family, "sdpa")
    with judge.capability("offload"):
        for layer in decoder_cache(judge.filled(judge.tiny.prompt(length=tokens))).layers:
            assert isinstance(layer, KVLayer)
            layer.move(torch.device("meta"))
            left = sum(tensor_bytes(layer, skip=("padding",)).values())
            assert left == 0, f"{type(layer).__name__}.move() leaves {left} bytes where they were"
