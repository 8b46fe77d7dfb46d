"""The assistant "self-kv" on a hierarchical cache: it drafts from the upper halves of the codes, and keeps no copy."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import itertools

import pytest
import torch
import transformers

import hfkv
from hfkv import kernels
from hfkv.cache import KVLayer
from hfkv.kernels import window
from hfkv.registry import manager
from hfkv.testing.cases import AssistantCase
from hfkv.testing.contracts import test_assistants as contracts
from hfkv.testing.models import decoder_cache, load
from hfkv_speculative import self_kv
from hfkv_speculative.plugin import ALWAYS

OPTIONS = {"nbits": 8, "hierarchical": True, "group_size": 8, "residual_length": 8, "sink_length": 2}
HERE = {"cache_implementation": "kivi", "cache_config": OPTIONS}


@pytest.fixture
def no_copy(monkeypatch):
    """Nothing can make a copy."""
    monkeypatch.delattr(self_kv, "CopyDrafter")


@pytest.fixture
def reads(monkeypatch):
    """``(queries, bits of the keys' codes, tokens that are packed)`` of every attention to packed blocks."""
    seen = []
    original = kernels.attend

    def attend(query, view, *args, **kwargs):
        seen.append((query.shape[2], view.keys.format.nbits, view.keys.length))
        return original(query, view, *args, **kwargs)

    monkeypatch.setattr(kernels, "attend", attend)
    monkeypatch.setattr(window, "attend_packed", attend)
    return seen


def model(family="llama", layers=None):
    """Not the kit's weights, which make float noise loud: a code that it moves would be a token that it moves."""
    config = copy.deepcopy(load(family, "sdpa").model.config)
    if layers is not None:
        config.num_hidden_layers = layers
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def prompt(rows=1, length=36):
    """Rows that differ: a text that repeats itself, and chance."""
    tiny = load("llama", "sdpa")
    return torch.cat([tiny.prompt(length=6).repeat(1, length // 6), tiny.prompt(rows=3, length=length, seed=4)])[:rows]


def generate(target, ids, **arguments):
    asked = {"do_sample": False, "max_new_tokens": 60, "return_dict_in_generate": True, **HERE, **arguments}
    return target.generate(ids, **asked)


def always(target, length=4, **options):
    """The assistant, drafting always."""
    constant = {"num_assistant_tokens": length, "num_assistant_tokens_schedule": "constant"}
    return hfkv.assistant("self-kv", target, **constant, **options)


def cache_of(output):
    return decoder_cache(output.get("cache", output.get("past_key_values")))


def same_cache(output, plain):
    """The same tokens in the same segments, of the same bytes."""
    ours, theirs = cache_of(output), cache_of(plain)
    bytes_of = [hfkv.memory(cache).layers for cache in (ours, theirs)]
    for one, other, *held in zip(ours.layers, theirs.layers, *bytes_of, strict=True):
        assert one.get_seq_length() == other.get_seq_length()
        # a sliding layer of transformers keeps what a crop cuts off until its next token
        assert held[0] == held[1] or not isinstance(one, KVLayer)
        assert not getattr(one, "reads_upper_half", False)
        for states, expected in ((one.keys, other.keys), (one.values, other.values)):
            # what the order of sums leaves may move a code; a token packed from a draft would be off by far more
            assert float((states - expected).abs().mean()) < 1e-4


@pytest.mark.parametrize("length", [1, 4, 40])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_ragged_batch_is_decoded_as_without_an_assistant(no_copy, family, length):
    """Rows accept different numbers of drafts, and 40 at once are more than can be drafted before a block is packed."""
    target, ids = model(family), prompt(rows=4)
    plain = generate(target, ids)
    output = generate(target, ids, **always(target, length))
    assert output.sequences.tolist() == plain.sequences.tolist()
    same_cache(output, plain)
    assert hfkv.memory(cache_of(output)).packed_bytes > 0
    stats = hfkv.stats(output)
    assert stats.acceptance_rate > 0.5
    assert stats.tokens > stats.verifications


def test_left_padded_rows_and_an_end_that_some_rows_reach(no_copy):
    target, ids = model(), prompt(rows=4)
    ids[1, :9] = ids[2, :20] = 0
    asked = {"attention_mask": (ids != 0).long(), "pad_token_id": 0}
    free = generate(target, ids, **asked)
    same_cache(generate(target, ids, **asked, **always(target)), free)
    asked["eos_token_id"] = int(free.sequences[1, ids.shape[1] + 20])
    plain = generate(target, ids, **asked)
    output = generate(target, ids, **asked, **always(target))
    assert output.sequences.tolist() == plain.sequences.tolist()


CACHES = {
    "some layers in 4 bits, some as they are": {
        "layers": {"0": "dynamic", "1": {"nbits": 4, "hierarchical": False}, "2": {}}
    },
    "no residual, no sinks": {"residual_length": 0, "sink_length": 0},
    "window": {"window_length": 24},
    "window at absolute positions": {"window_length": 24, "positions": "absolute"},
}


@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
def test_other_layers_are_read_as_they_are(no_copy, reads, options):
    target, ids = model(), prompt(rows=2)
    asked = {"cache_config": {**OPTIONS, **options}}
    plain = generate(target, ids, **asked)
    reads.clear()
    output = generate(target, ids, **asked, **always(target))
    assert output.sequences.tolist() == plain.sequences.tolist()
    same_cache(output, plain)
    assert {bits for queries, bits, _ in reads if queries == 1} >= {4}


def test_sliding_layers_that_are_packed_too(no_copy):
    target, ids = model("gemma3"), prompt(rows=2)
    asked = {"cache_config": {**OPTIONS, "quantize_sliding": True, "residual_length": 4}}
    plain = generate(target, ids, **asked)
    output = generate(target, ids, **asked, **always(target))
    assert output.sequences.tolist() == plain.sequences.tolist()
    same_cache(output, plain)


def test_drafts_read_the_upper_halves_and_the_verification_all_bits(no_copy, reads):
    """And no token that is drafted is ever packed: a draft ends where the next block would be."""
    target = model(layers=1)
    output = generate(target, prompt(), **always(target, length=8))
    stats = hfkv.stats(output)
    assert {bits for queries, bits, _ in reads if queries > 1} == {8}
    drafts = [packed for queries, bits, packed in reads if bits == 4]
    assert {queries for queries, bits, _ in reads if bits == 4} == {1}
    assert len(drafts) == stats.drafted
    assert len(reads) - len(drafts) == stats.verifications
    # the packed part is only ever longer, by a block at a time
    lengths = [packed for _, _, packed in reads]
    assert {later - earlier for earlier, later in itertools.pairwise(lengths)} <= {0, 8}


def test_drafting_keeps_no_bytes():
    """Of all tensors that are alive while drafts are made and verified, the codes are those of the one cache."""
    target, ids = model(layers=1), prompt(rows=2)
    peaks = {}

    def codes(name, *_):
        # by its type alone: to ask anything else of every object warns of some
        tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor and thing.dtype == torch.uint8]
        stores = {store.data_ptr(): store.nbytes() for store in (tensor.untyped_storage() for tensor in tensors)}
        peaks[name] = max(peaks.get(name, 0), sum(stores.values()))

    copied = {"nbits": 4, "group_size": 8, "residual_length": 8, "sink_length": 2}
    for name, asked in (
        ("alone", {}),
        ("view", always(target)),
        ("copy", always(target, cache_config=copied)),
    ):
        gc.collect()
        handle = target.model.layers[0].register_forward_hook(functools.partial(codes, name))
        output = generate(target, ids, max_new_tokens=12, **asked)
        handle.remove()
        held = hfkv.memory(cache_of(output)).packed_bytes
        del output
    assert held > 0
    assert peaks["view"] == peaks["alone"] < peaks["copy"]


def test_copy_is_made_where_it_is_asked_for_or_has_to_be(monkeypatch, reads):
    made = []
    original = self_kv.CopyDrafter
    monkeypatch.setattr(self_kv, "CopyDrafter", lambda *given: made.append(original(*given)) or made[-1])
    target, ids = model(), prompt()
    copied = {"nbits": 2, "group_size": 8, "residual_length": 8}
    for asked, cache in (
        ({"cache_config": copied}, HERE),
        ({"cache_implementation": "kivi", "cache_config": copied}, HERE),
        ({}, {"cache_config": {**OPTIONS, "hierarchical": False}}),
        ({}, {"cache_implementation": None, "cache_config": None}),
    ):
        reads.clear()
        output = generate(target, ids, **cache, **always(target, **asked))
        assert output.sequences.tolist() == generate(target, ids, **cache).sequences.tolist()
        bits = {bits for _, bits, _ in reads}
        assert made.pop() is not None
        assert not made
        assert (2 in bits) == bool(asked)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_draft_that_fails_leaves_the_cache_as_it_was(no_copy, family):
    target, ids = model(family), prompt()
    expected = generate(target, ids)
    cache = hfkv.make_cache("kivi", target, **OPTIONS)
    argument = hfkv.integration.cache_argument(target)
    known = expected.sequences[:, :44]
    with torch.no_grad():
        target(known[:, :-1], **{argument: cache})
    before = [(layer.get_seq_length(), layer.keys.clone()) for layer in cache.layers]
    again = copy.deepcopy(cache)
    drafts = iter(range(100))

    def fail(*_):
        # in the middle of the second draft of the first round that drafts: some layers hold its token, some do not
        if any(getattr(layer, "reads_upper_half", False) for layer in cache.layers) and next(drafts) == 1:
            raise RuntimeError("out of memory")

    handle = target.model.layers[1].register_forward_pre_hook(fail)
    arguments = {"cache_implementation": None, "cache_config": None, argument: cache}
    with pytest.raises(RuntimeError, match="out of memory"):
        generate(target, known, **arguments, **always(target))
    handle.remove()
    assert next(drafts) == 2
    for layer, (length, keys) in zip(cache.layers, before, strict=True):
        assert not getattr(layer, "reads_upper_half", False)
        # the token that was verified before stays
        assert layer.get_seq_length() == length + 1
        if isinstance(layer, KVLayer):
            assert torch.equal(layer.keys[:, :, :length], keys)
    second = generate(target, known, **{**arguments, argument: again}, **always(target), max_new_tokens=20)
    assert second.sequences.tolist() == expected.sequences[:, :64].tolist()


# the contracts of assistants, for models whose cache is hierarchical unless they are told otherwise


@functools.cache
def _loaded(family, attention):
    tiny = copy.copy(load(family, attention))
    tiny.model = copy.deepcopy(tiny.model)
    hfkv.set_default(tiny.model, "kivi", **OPTIONS)
    return tiny


@functools.cache
def _case():
    spec = manager().find(hfkv.AssistantSpec, "self-kv", "assistant")
    return AssistantCase(dataclasses.replace(spec, contract_options=ALWAYS))


CONTRACTS = [
    contracts.test_greedy_text_is_that_of_plain_decoding,
    contracts.test_rows_of_a_batch_are_what_they_are_alone,
    contracts.test_stops_where_plain_decoding_stops,
    contracts.test_processors_are_honoured,
    contracts.test_calls_do_not_depend_on_each_other,
    contracts.test_sampled_text_depends_on_the_seed_alone,
]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__.removeprefix("test_"))
def test_contract(no_copy, monkeypatch, contract, family):
    monkeypatch.setattr(contracts, "load", _loaded)
    wanted = contract.__code__.co_varnames[: contract.__code__.co_argcount]
    given = {"hfkv_assistant": _case(), "family": family, "cache": "dynamic"}
    contract(**{name: value for name, value in given.items() if name in wanted})


@pytest.mark.parametrize("sampling", ["coupled", "rejection"])
def test_sampling_is_exact(no_copy, monkeypatch, sampling):
    """From the second token on, the whole prompt is packed."""
    small = contracts._small

    def packed(vocabulary):
        made = small(vocabulary)
        hfkv.set_default(made, "kivi", **{**OPTIONS, "residual_length": 0, "sink_length": 0})
        return made

    monkeypatch.setattr(contracts, "_small", packed)
    case = AssistantCase(dataclasses.replace(_case().spec, contract_options={**ALWAYS, "draft_sampling": sampling}))
    contracts.test_sampling_is_exact(case, 0.8, 4, 0.9)
