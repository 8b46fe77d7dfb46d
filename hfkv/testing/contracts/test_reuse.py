"""A cache that lives longer than one call: turns, shared prefixes, copies, manual loops."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from hfkv.cache.memory import tensor_bytes
from hfkv.testing.cases import CacheCase
from hfkv.testing.matrix import every_attention, every_decoder, every_family
from hfkv.testing.models import NEW_TOKENS, PADDING, PROMPT_LENGTH, decoder_cache
from hfkv.testing.oracle import Judge

# nothing yet, a short prompt, a long one, and one with tokens decoded on top
every_state = pytest.mark.parametrize("tokens", [0, 5, PROMPT_LENGTH, PROMPT_LENGTH + 9])


@pytest.mark.parametrize("shorter", [0, 3], ids=["full", "padded"])
@every_decoder
@every_attention
def test_multi_turn(hfkv_case: CacheCase, family: str, attention: str, shorter: int) -> None:
    """A second turn on the cache of the first, the mask extended, is one long conversation."""
    judge = Judge(hfkv_case, family, attention)
    tiny = judge.tiny
    ids = tiny.prompt(rows=2)
    ids[1, :shorter] = PADDING
    first = judge.generate(ids, attention_mask=(ids != PADDING).long())
    cache = tiny.cache_of(first)
    ids = torch.cat([first.sequences, tiny.prompt(rows=2, length=9, seed=2)], dim=1)
    second = tiny.generate(ids, attention_mask=(ids != PADDING).long(), **{tiny.cache_argument: cache})
    assert tiny.cache_of(second) is cache
    assert cache.get_seq_length() == second.sequences.shape[1] - 1, "all but the last token have been seen"
    for row, padding in enumerate((0, shorter)):
        expected = judge.plain(second.sequences[row : row + 1, padding:], NEW_TOKENS)
        judge.faithful(judge.generated(second)[row : row + 1], expected, f"row {row} in its second turn")


@every_decoder
@every_attention
def test_prefix_copied_and_reused(hfkv_case: CacheCase, family: str, attention: str) -> None:
    """Two suffixes go on from deep copies of one prefix, and the prefix stays what it was."""
    judge = Judge(hfkv_case, family, attention)
    tiny = judge.tiny
    prefix = tiny.prompt()
    cache = judge.filled(prefix)
    for length in (5, 11):
        suffix = tiny.prompt(length=length, seed=length)
        prompt = torch.cat([prefix, suffix], dim=1)
        output = tiny.generate(prompt, **{tiny.cache_argument: copy.deepcopy(cache)})
        actual, what = judge.generated(output), f"a suffix of {length} tokens on a copied prefix"
        fresh = judge.filled(prefix)
        last = tiny.feed(fresh, prompt)[:, -1:]
        expected = torch.cat([last, tiny.feed(fresh, output.sequences[:, :-1], chunk=1)], dim=1)
        hint = "the copy shares state with the original"
        judge.same(actual, expected, what, "those of a cache that saw the prefix itself", hint)
        judge.faithful(actual, judge.plain(output.sequences, NEW_TOKENS), what, hint)
    assert cache.get_seq_length() == PROMPT_LENGTH, "the copies' tokens are counted in the prefix"


@every_family
@every_attention
def test_token_by_token(hfkv_case: CacheCase, family: str, attention: str) -> None:
    """A manual loop that never sees more than one token."""
    judge = Judge(hfkv_case, family, attention)
    ids = judge.tiny.prompt(rows=2, length=PROMPT_LENGTH + NEW_TOKENS)
    cache = judge.cache()
    actual = judge.tiny.feed(cache, ids, chunk=1)
    assert cache.get_seq_length() == ids.shape[1]
    judge.faithful(actual, judge.logits(ids), "a manual loop token by token", "one token is stored or packed wrongly")


@every_state
@every_family
@every_attention
def test_deepcopy(hfkv_case: CacheCase, family: str, attention: str, tokens: int) -> None:
    """A copy and its original go on with different tokens and do not notice each other."""
    judge = Judge(hfkv_case, family, attention)
    tiny = judge.tiny
    ids = tiny.prompt(length=tokens + 12)
    other = torch.cat([ids[:, :tokens], tiny.prompt(length=tokens + 12, seed=4)[:, tokens:]], dim=1)
    original = judge.filled(ids[:, :tokens])
    twin = copy.deepcopy(original)
    shared = tensor_bytes(original).keys() & tensor_bytes(twin).keys() - {0}
    assert not shared, f"{len(shared)} tensors of {hfkv_case} are shared between a cache and its deep copy"
    # in turns, so that what one writes in place would show in the other
    steps = [
        (tiny.feed(original, ids[:, :length], 1), tiny.feed(twin, other[:, :length], 1))
        for length in range(tokens + 1, tokens + 13)
    ]
    for sequences, actual in zip((ids, other), zip(*steps, strict=True), strict=True):
        expected = tiny.feed(judge.filled(sequences[:, :tokens]), sequences, chunk=1)
        hint = "state is shared with the copy: implement __deepcopy__, or hold no tensor outside the layer"
        judge.same(torch.cat(actual, dim=1), expected, "beside a deep copy", "those without a copy", hint)


@every_state
@every_family
@every_attention
def test_pickle(hfkv_case: CacheCase, family: str, attention: str, tokens: int) -> None:
    """A cache that was pickled goes on as if it had not been."""
    judge = Judge(hfkv_case, family, attention)
    ids = judge.tiny.prompt(length=tokens + 12)
    loaded = pickle.loads(pickle.dumps(judge.filled(ids[:, :tokens])))
    judge.is_ours(loaded)
    assert decoder_cache(loaded).name == hfkv_case.spec.name
    actual = judge.tiny.feed(loaded, ids, chunk=1)
    expected = judge.tiny.feed(judge.filled(ids[:, :tokens]), ids, chunk=1)
    judge.same(actual, expected, "after a pickle round trip", "those without it", "some state is not pickled")
