"""The cache "crosslayer": what is stored, what it costs, and how it composes. The conformance kit tests the rest."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import hfkv
import hfkv_crosslayer
from hfkv.cache.view import KVHandle
from hfkv.integration import cache_argument
from hfkv.testing.models import FAMILIES, load, logits_error
from hfkv_crosslayer.layer import CrossLayer

LAYERS, KV_HEADS, HEAD_DIM = 6, 2, 32


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config(**changes):
    return LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        **changes,
    )


def filled(cache, tokens, dtype=torch.bfloat16, layers=LAYERS):
    generator = torch.Generator().manual_seed(0)
    for index in range(layers):
        states = torch.randn(2, 1, KV_HEADS, tokens, HEAD_DIM, generator=generator).to(dtype)
        cache.update(states[0], states[1], index)
    return cache


def stored(cache):
    return hfkv.memory(cache).stored_bytes


@pytest.mark.parametrize("family", list(FAMILIES))
def test_groups_of_one_layer_are_the_plain_cache(family):
    """Nothing is shared, so nothing changes: to the bit, and in bytes."""
    tiny = load(family, "sdpa")
    ids = tiny.prompt(rows=2, length=30)
    cache, plain = tiny.wrapped(hfkv.make_cache("crosslayer", tiny.model, share=1)), tiny.plain_cache()
    assert torch.equal(tiny.feed(cache, ids, chunk=7), tiny.feed(plain, ids, chunk=7))
    assert stored(cache) == stored(plain)


def test_sharing_by_two_halves_the_bytes_exactly():
    plain = stored(filled(DynamicCache(config=config()), 4096))
    cache = filled(hfkv.make_cache("crosslayer", config()), 4096)
    assert 2 * stored(cache) == plain
    assert [layer.stored_bytes for layer in hfkv.memory(cache).layers] == [plain // LAYERS, 0] * 3
    assert hfkv.memory(cache).bits_per_element == 8


def test_sharing_and_bits_multiply():
    """By two and in 4 bits: more than 6 times smaller than plain bfloat16 at 4,096 tokens."""
    plain = stored(filled(DynamicCache(config=config()), 4096))
    packing = {"nbits": 4, "residual_length": 64}
    packed = filled(hfkv.make_cache("kivi", config(), **packing), 4096)
    both = filled(hfkv.make_cache("crosslayer", config(), share=2, store="kivi", store_config=packing), 4096)
    assert 2 * stored(both) == stored(packed)
    assert plain / stored(both) > 6


def test_every_borrower_reads_its_donor_and_packed_handles_pass_through():
    cache = filled(hfkv.make_cache("crosslayer", config(), groups=[[0], [1, 2], [3, 4, 5]], store="kivi"), 300)
    token = torch.ones(1, KV_HEADS, 1, HEAD_DIM, dtype=torch.bfloat16)
    returned = [cache.update(token * index, token * index, index) for index in range(LAYERS)]
    for borrower, donor in ((2, 1), (4, 3), (5, 3)):
        assert all(lent is own for lent, own in zip(returned[borrower], returned[donor], strict=True))
    assert all(isinstance(states, KVHandle) for pair in returned for states in pair)
    # what is lent in full precision is not kept
    assert all(layer._lent is None for layer in cache.layers)


def test_a_model_whose_donor_is_gone_is_told():
    torch.manual_seed(0)
    model = LlamaForCausalLM(config()).eval()
    cache = hfkv.make_cache("crosslayer", model)
    del model.model.layers[2]
    with pytest.raises(RuntimeError, match="layer 3 reads the keys and values of layer 2, which has not run"):
        model(torch.tensor([[1, 2, 3]]), **{cache_argument(model): cache})


def test_a_layer_that_waits_has_not_seen_the_tokens_of_this_forward():
    """Some models compute positions inside attention, from the length of their own layer."""
    cache = hfkv.make_cache("crosslayer", config(), groups=[[0, 1, 2]])
    states = torch.zeros(1, KV_HEADS, 5, HEAD_DIM)
    cache.update(states, states, 0)
    assert [layer.get_seq_length() for layer in cache.layers[:3]] == [5, 0, 0]
    cache.update(states, states, 1)
    assert [layer.get_seq_length() for layer in cache.layers[:3]] == [5, 5, 0]
    cache.update(states, states, 2)
    assert [layer.get_seq_length() for layer in cache.layers[:3]] == [5, 5, 5]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_shares_within_itself(copied):
    cache = filled(hfkv.make_cache("crosslayer", config(), store="kivi"), 300)
    other = copied(cache)
    assert stored(other) == stored(cache)
    assert other.layers[0] is not cache.layers[0]
    assert other.layers[1].donor is other.layers[0]
    cache.reset()
    assert other.get_seq_length() == 300


def test_layers_have_stores_of_their_own():
    cache = hfkv.make_cache(
        "crosslayer",
        config(),
        store="kivi",
        store_config={"nbits": 4},
        layers={"0-1": {"store_config": {"nbits": 8}}, "2": {"store": "dynamic", "store_config": None}, "5": "dynamic"},
    )
    kinds = [
        type(layer.store).__name__ if isinstance(layer, CrossLayer) else type(layer).__name__ for layer in cache.layers
    ]
    assert kinds == ["KiviLayer", "NoneType", "DynamicLayer", "NoneType", "KiviLayer", "DynamicLayer"]
    assert [cache.layers[index].store.options.nbits for index in (0, 4)] == [8, 4]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"share": 0}, ValueError, "share=0 must be an integer of at least 1"),
        ({"share": 2, "groups": [[0, 1]]}, ValueError, "leave out share=2"),
        ({"map": "similar", "groups": [[0, 1]]}, ValueError, "leave out map='similar'"),
        ({"map": "like"}, ValueError, "map='like' is not supported. Choose from: 'neighbours', 'similar'"),
        ({"map": "similar"}, ValueError, "pass the model or groups"),
        ({"store": "kivvi"}, ValueError, "store='kivvi' is not known.*Did you mean 'kivi'"),
        ({"store": "crosslayer"}, ValueError, "cannot store what it shares itself"),
        ({"store_config": {"nbits": 4}}, ValueError, "'dynamic' takes no options"),
        ({"store": "kivi", "store_config": {"nbit": 4}}, ValueError, "option 'nbit' is not known to 'kivi'"),
        ({"store": "kivi", "store_config": {"layers": {}}}, ValueError, "write them beside store"),
        ({"layers": {"1": {"store": "kivi"}}}, ValueError, "layer 1 stores nothing, it reads layer 0"),
        ({"layers": {"1": {"share": 3}}}, ValueError, "of the whole cache"),
        ({"groups": [[0, 1]], "layers": {"1": "dynamic"}}, ValueError, "layer 1 cannot share"),
    ],
)
def test_what_cannot_be_is_refused(options, error, says):
    with pytest.raises(error, match=says):
        hfkv.make_cache("crosslayer", config(), **options)


def test_heads_that_do_not_fit_are_named():
    cache = hfkv.make_cache("crosslayer", config())
    cache.update(torch.zeros(1, 2, 3, 32), torch.zeros(1, 2, 3, 32), 0)
    with pytest.raises(ValueError, match="layer 1 cannot read layer 0: they have 4 and 2 heads of 16 and 32 channels"):
        cache.update(torch.zeros(1, 4, 3, 16), torch.zeros(1, 4, 3, 16), 1)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4"])
def test_stored_in_kivi_it_decodes_what_the_shared_model_computes(family):
    """8-bit storage of shared keys and values, against the reference in full precision."""
    from hfkv_crosslayer.reference import reference

    tiny = load(family, "sdpa")
    ids = tiny.prompt(rows=2, length=60)
    packing = {"nbits": 8, "group_size": 8, "residual_length": 8, "sink_length": 2}
    cache = hfkv.make_cache("crosslayer", tiny.model, store="kivi", store_config=packing)
    actual = tiny.feed(cache, ids, chunk=1)
    assert hfkv.memory(cache).packed_bytes > 0
    expected = tiny.logits(ids, reference(tiny.model, {}))
    assert float(logits_error(actual, expected).max()) < 0.2 * tiny.cost_of_a_token
    assert float(logits_error(actual, tiny.logits(ids)).max()) > 0.2 * tiny.cost_of_a_token


@pytest.mark.parametrize("chunk", [1, 7, 60])
@pytest.mark.parametrize("family", ["llama", "qwen2", "deepseek_v3", "deepseek_v2"])
def test_stored_in_a_window_borrowers_see_what_their_donor_keeps(family, chunk):
    """Against one forward of the shared model whose mask shows the sinks and the window."""
    from hfkv_crosslayer.reference import reference

    tiny = load(family, "sdpa")
    ids = tiny.prompt(rows=2, length=60)
    kept = {"window_length": 9, "sink_length": 3}
    cache = hfkv.make_cache("crosslayer", tiny.model, store="sink", store_config={"positions": "absolute", **kept})
    actual = tiny.feed(cache, ids, chunk)
    assert [layer.tokens for layer in hfkv.memory(cache).layers] == [12] * len(cache.layers)
    query, token = torch.arange(60)[:, None], torch.arange(60)
    visible = (token <= query) & ((token < 3) | (token > query - 9))
    mask = torch.zeros(60, 60).masked_fill(~visible, torch.finfo(torch.float32).min)
    shared = {tiny.cache_argument: reference(tiny.model, {})}
    with torch.no_grad():
        expected = tiny.model(ids, attention_mask=mask[None, None].expand(2, 1, -1, -1), **shared).logits
    assert float(logits_error(actual, expected).max()) < 1e-3
    moved = [
        tiny.feed(hfkv.make_cache("crosslayer", tiny.model, store="sink", store_config=kept), ids, size)
        for size in (chunk, 60)
    ]
    assert float(logits_error(*moved).max()) < 1e-3
    assert float(logits_error(moved[0], expected).max()) > 0.1 * tiny.cost_of_a_token


def test_generate_takes_it_by_name_with_groups_from_a_saved_default(tmp_path):
    torch.manual_seed(0)
    model = LlamaForCausalLM(config()).eval()
    groups = hfkv_crosslayer.similar_groups(model, input_ids=torch.randint(0, 64, (1, 24)), share=3, progress=False)
    hfkv.set_default(model, "crosslayer", groups=groups)
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    output = loaded.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, return_dict_in_generate=True)
    assert output[cache_argument(model)].layers[groups[0][0]].options.groups == groups
