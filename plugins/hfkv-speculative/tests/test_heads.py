"""Drafting heads, planted: right by construction, wrong by construction; chains and trees."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import hfkv
from hfkv.decoding import cache_argument
from hfkv.heads import EagleHead, MedusaHeads, save_heads
from hfkv.speculation import Tree
from hfkv.testing.models import PADDING, load
from hfkv_speculative.contract import eagle_head, medusa_heads

ALWAYS = {"num_assistant_tokens_schedule": "constant"}
NEW_TOKENS = 40


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def llama(layers, **sizes):
    config = copy.deepcopy(load("llama", "sdpa").model.config)
    config.num_hidden_layers = layers
    for name, value in sizes.items():
        setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def counting_model():
    """The next token is the last one plus 8, modulo the vocabulary; layers add nothing."""
    model = llama(2, hidden_size=96, head_dim=24)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.get_input_embeddings().weight.copy_(torch.eye(96))
    model.get_output_embeddings().weight.copy_(torch.eye(96).roll(8, dims=0))
    return model


@torch.no_grad()
def exact_medusa(model, heads):
    """Each head adds 8 once more."""
    found = MedusaHeads.for_model(model, num_heads=heads, own_lm_head=True)
    for index, head in enumerate(found.lm_heads):
        head.weight.copy_(torch.eye(96).roll(8 * (index + 2), dims=0))
    return found


@torch.no_grad()
def exact_eagle(model):
    """The one layer of the model itself: it sees all tokens, at the model's own places."""
    head = EagleHead.for_model(model)
    size = model.config.hidden_size
    head.join.weight.copy_(torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1))
    head.join.bias.zero_()
    state = {name: tensor for name, tensor in model.base_model.state_dict().items() if "embed_tokens" not in name}
    head.decoder.load_state_dict(state)
    return head.eval()


def planted(kind):
    if kind == "medusa":
        model = counting_model()
        return model, exact_medusa(model, 4)
    model = llama(1)
    return model, exact_eagle(model)


def prompt(rows=1, length=24):
    ids = load("llama", "sdpa").prompt(rows=rows, length=length)
    # counting from here never meets the padding
    ids[:, -1] = torch.arange(rows) + 3
    return ids


def plain(model, ids, **arguments):
    asked = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "suppress_tokens": [PADDING], **arguments}
    return model.generate(ids, **asked)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.8}])
def test_exact_heads_are_accepted_always(kind, sampling):
    model, heads = planted(kind)
    assisted = hfkv.assistant(kind, model, heads=heads, num_assistant_tokens=4, **ALWAYS)
    # medusa's heads do not know what is sampled: they are exact where the next token is certain
    sampling = {**sampling, "temperature": 0.01} if sampling and kind == "medusa" else sampling
    stats = hfkv.stats(plain(model, prompt(), **sampling, **assisted))
    assert stats.accepted == stats.examined == stats.drafted
    # a forward of four drafts gives five tokens
    assert stats.verifications == -(-(NEW_TOKENS - 1) // 5)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
@pytest.mark.parametrize("cache", ["dynamic", "kivi", "chunks"])
def test_exact_heads_of_a_padded_batch_are_accepted_always(kind, cache):
    model, heads = planted(kind)
    ids = prompt(rows=3)
    mask = torch.ones_like(ids)
    mask[1, :7], mask[2, :20] = 0, 0
    ids[mask == 0] = PADDING
    arguments = {
        "dynamic": {},
        # nothing is packed: what kivi loses, heads that read the full precision do not
        "kivi": {"cache_implementation": "kivi", "cache_config": {"residual_length": 128}},
        "chunks": {"prefill_chunk_size": 5},
    }[cache]
    expected = plain(model, ids, attention_mask=mask, **arguments)
    assisted = hfkv.assistant(kind, model, heads=heads, num_assistant_tokens=4, **ALWAYS)
    output = plain(model, ids, attention_mask=mask, **arguments, **assisted)
    assert output.tolist() == expected.tolist()
    assert hfkv.stats(output).acceptance_rate == 1


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads_in_a_second_turn(kind):
    # the target's hidden states of the first turn are gone; exact heads that need none are right all the same
    model, heads = planted(kind)
    assisted = hfkv.assistant(kind, model, heads=heads, num_assistant_tokens=3, **ALWAYS)
    first = plain(model, prompt(), return_dict_in_generate=True)
    cache = first.get("cache", first.get("past_key_values"))
    ids = torch.cat([first.sequences, prompt(length=5)], dim=1)
    expected = plain(model, ids)
    name = "cache" if "cache" in first else "past_key_values"
    output = plain(model, ids, **{name: cache}, **assisted)
    assert output.tolist() == expected.tolist()
    if kind == "medusa":
        assert hfkv.stats(output).acceptance_rate == 1


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
@pytest.mark.parametrize("branches", [None, (3, 2, 1)])
@pytest.mark.parametrize("draft_vocab_size", [None, 20])
def test_random_heads_change_nothing(kind, branches, draft_vocab_size):
    model = llama(3)
    if kind == "medusa":
        heads = MedusaHeads.for_model(model, own_lm_head=draft_vocab_size is None, draft_vocab_size=draft_vocab_size)
    else:
        heads = EagleHead.for_model(model, draft_vocab_size=draft_vocab_size)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    assisted = hfkv.assistant(kind, model, heads=heads, branches=branches, **ALWAYS)
    output = plain(model, prompt(), **assisted)
    assert output.tolist() == plain(model, prompt()).tolist()
    # of fewer tokens, more are right by chance
    assert hfkv.stats(output).acceptance_rate < (0.15 if draft_vocab_size is None else 0.4)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads_take_no_forward_of_the_model_and_leave_it_alone(kind):
    model, heads = planted(kind)
    forwards = []
    handle = model.register_forward_hook(lambda *_: forwards.append(1))
    output = plain(model, prompt(), **hfkv.assistant(kind, model, heads=heads, **ALWAYS))
    assert len(forwards) == 1 + hfkv.stats(output).verifications
    handle.remove()

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    with pytest.raises(Stop):
        plain(model, prompt(), stopping_criteria=[stop], **hfkv.assistant(kind, model, heads=heads, **ALWAYS))
    assert not model.base_model._forward_hooks


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 1.5, "top_k": 20}])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_tree_gives_the_text_and_the_cache_of_plain_decoding(kind, sampling, attention):
    # heads that are right at times, so that paths other than the first are taken
    model = llama(3)
    model.set_attn_implementation(attention)
    torch.manual_seed(5)
    heads = (medusa_heads if kind == "medusa" else eagle_head)(model)["heads"]
    ids = prompt(length=6).repeat(1, 4)
    arguments = {**sampling, "return_dict_in_generate": True, "output_logits": True, "repetition_penalty": 1.05}
    torch.manual_seed(3)
    chain = plain(model, ids, **arguments, **hfkv.assistant("lookup", model))
    torch.manual_seed(3)
    branches = (12, 4, 2)
    tree = plain(model, ids, **arguments, **hfkv.assistant(kind, model, heads=heads, branches=branches, **ALWAYS))
    assert tree.sequences.tolist() == chain.sequences.tolist()
    if not sampling:
        assert tree.sequences.tolist() == plain(model, ids, **arguments).sequences.tolist()
    assert hfkv.stats(tree).accepted > 3
    for one, other in zip(tree.logits, chain.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
    for ours, theirs in zip(*((x.get("cache") or x.past_key_values).layers for x in (tree, chain)), strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(ours.values, theirs.values, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_tree_of_exact_heads_is_as_deep_as_it_can_be(kind):
    model, heads = planted(kind)
    output = plain(model, prompt(), **hfkv.assistant(kind, model, heads=heads, branches=(2, 2, 1), **ALWAYS))
    stats = hfkv.stats(output)
    assert stats.acceptance_rate == 1
    assert stats.verifications == -(-(NEW_TOKENS - 1) // 4)
    # two nodes, four, four
    assert stats.drafted / stats.verifications > 9


def test_tree_finds_what_a_chain_misses():
    # of two tokens that follow each one, the head prefers the wrong one
    model = counting_model()
    heads = exact_medusa(model, 3)
    with torch.no_grad():
        for index, head in enumerate(heads.lm_heads):
            head.weight += 2 * torch.eye(96).roll(8 * (index + 2) + 1, dims=0)
    accepted = []
    for branches in ((1, 1, 1), (2, 2, 2)):
        output = plain(model, prompt(), **hfkv.assistant("medusa", model, heads=heads, branches=branches, **ALWAYS))
        accepted.append(hfkv.stats(output).acceptance_rate)
    assert accepted == [0, 1]


def test_places_of_a_tree():
    tree = Tree()
    first = tree.add([5, 6], -1)
    second = tree.add([7, 8], first[1])
    tree.add([9], second[0])
    assert tree.depth == 3
    assert tree.depths() == [0, 1, 1, 2, 2, 3]
    assert tree.sees().int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 0, 1, 1, 0, 1],
    ]
    said = {(): 6, (6,): 8, (6, 8): 1}
    assert tree.walk(lambda place, path: said[tuple(path)]) == ([1, 3], 1)
    assert tree.ends_at([1, 3])
    assert not tree.ends_at([1])
    assert tree.walk(lambda place, path: 4) == ([], 4)


def test_trees_where_they_cannot_be_verified():
    model, heads = planted("medusa")
    assisted = hfkv.assistant("medusa", model, heads=heads, branches=(2, 1))
    with pytest.raises(
        NotImplementedError, match=r"keeps every token as it is.*Let the assistant 'medusa' draft chains"
    ):
        plain(model, prompt(), cache_implementation="kivi", **assisted)
    sliding = load("gemma3", "sdpa").model
    heads_of_sliding = hfkv.assistant("medusa", sliding, heads=MedusaHeads.for_model(sliding), branches=(2, 1))
    for given in ({}, {cache_argument(sliding): transformers.DynamicCache()}):
        with pytest.raises(NotImplementedError, match=r"here are layers of DynamicSlidingWindowLayer"):
            plain(sliding, prompt(), **given, **heads_of_sliding)
    with pytest.raises(NotImplementedError, match=r"is for one row, and this batch has 2"):
        plain(model, prompt(rows=2), **assisted)
    with pytest.raises(ValueError, match=r"draft_sampling='rejection' is for chains"):
        hfkv.assistant("medusa", model, heads=heads, branches=(2, 1), draft_sampling="rejection")
    with pytest.raises(ValueError, match=r"branches\[1\]=0 must be an integer of at least 1"):
        hfkv.assistant("medusa", model, heads=heads, branches=(2, 0))
    with pytest.raises(ValueError, match=r"leave num_assistant_tokens=3 out"):
        hfkv.assistant("medusa", model, heads=heads, branches=(2, 1), num_assistant_tokens=3)


def test_heads_from_a_folder_and_heads_that_do_not_fit(tmp_path):
    model, heads = planted("eagle")
    save_heads(heads, tmp_path / "head")
    output = plain(model, prompt(), **hfkv.assistant("eagle", model, heads=str(tmp_path / "head"), **ALWAYS))
    assert hfkv.stats(output).acceptance_rate == 1
    with pytest.raises(ValueError, match=r"heads is missing"):
        hfkv.assistant("eagle", model)
    with pytest.raises(TypeError, match=r"must be 'medusa' heads .* got eagle heads"):
        hfkv.assistant("medusa", model, heads=heads)
    with pytest.raises(ValueError, match=r"hidden_size=64, and LlamaForCausalLM has 96"):
        hfkv.assistant("eagle", counting_model(), heads=heads)
    with pytest.raises(ValueError, match=r"heads are torch.float32 .* the model torch.bfloat16"):
        hfkv.assistant("eagle", copy.deepcopy(model).bfloat16(), heads=heads)
    with pytest.raises(NotImplementedError, match=r"has an encoder"):
        hfkv.assistant("eagle", load("t5", "sdpa").model, heads=heads)
