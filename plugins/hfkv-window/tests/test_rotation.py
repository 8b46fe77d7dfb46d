"""Sinks at cache positions, however models turn their queries: against the model itself, without a cache."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers

import hfkv
from hfkv.cache import find_rotation
from hfkv.integration import cache_argument
from hfkv.testing.forgetting import forgetting
from hfkv.testing.models import FAMILIES, load, logits_error

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
ROPE = {"rope_theta": 10000.0}
LONG = {"factor": 8.0, "original_max_position_embeddings": 32}
MODELS = {
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **ROPE}},
    "dynamic, within its length": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **ROPE}},
    "yarn": {"rope_parameters": {"rope_type": "yarn", **LONG, **ROPE}},
    "llama3": {
        "rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONG, **ROPE}
    },
    # interleaved pairs
    "cohere": {"model_type": "cohere", "logit_scale": 1.0},
    # interleaved, and half of the channels only
    "glm": {"model_type": "glm", "head_dim": 16, "rope_parameters": {"partial_rotary_factor": 0.5, **ROPE}},
    # a quarter of the channels, sliced before they are turned
    "stablelm": {"model_type": "stablelm", "rope_parameters": {"partial_rotary_factor": 0.25, **ROPE}},
    "phi": {"model_type": "phi", "rope_parameters": {"partial_rotary_factor": 0.5, **ROPE}},
    "gpt_neox": {"model_type": "gpt_neox", "rope_parameters": {"partial_rotary_factor": 0.25, **ROPE}},
    # queries are normed before they are turned
    "qwen3": {"model_type": "qwen3", "head_dim": 24},
    # every second layer turns nothing
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0]},
    # scores are bounded
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "layer_types": ["full_attention"] * 2},
    # latents are cached, and pairs of neighbours turned in the last channels; a scaling has a factor of its own
    "deepseek_v3": {**FAMILIES["deepseek_v3"], "rope_parameters": {"rope_type": "yarn", **LONG, **ROPE}},
    # the same in complex numbers
    "deepseek_v2": FAMILIES["deepseek_v2"],
    "deepseek_v2, yarn": {**FAMILIES["deepseek_v2"], "rope_parameters": {"rope_type": "yarn", **LONG, **ROPE}},
    # a logit per head takes attention away, and cosines come for half of the channels
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["full_attention"] * 2,
        "sliding_window": 16,
    },
}


def tiny(settings, attention="sdpa"):
    config = transformers.AutoConfig.for_model(**{"model_type": "llama", **SIZES, "initializer_range": 0.1, **settings})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter)
    return model


def feed(model, cache, ids, chunk):
    with torch.no_grad():
        parts = [model(part, **{cache_argument(model): cache}).logits for part in ids.split(chunk, dim=1)]
    return torch.cat(parts, dim=1)


def ids_of(length):
    return torch.randint(1, 96, (2, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("positions", ["cache", "absolute"])
@pytest.mark.parametrize("name", list(MODELS))
def test_logits_are_those_of_the_kept_tokens_at_their_positions(name, positions):
    only_eager = MODELS[name].get("model_type") in ("gpt_oss", "gemma2")
    model = tiny(MODELS[name], "eager" if only_eager else "sdpa")
    ids = ids_of(60)
    cache = hfkv.make_cache("sink", model, window_length=8, sink_length=3, positions=positions)
    # more than a chunk, so that distances differ within one forward and between them
    actual = feed(model, cache, ids, 23)
    patterns = {index: layer.attended(60) for index, layer in enumerate(cache.layers)}
    with torch.no_grad(), forgetting(model, patterns):
        expected = model(ids, use_cache=False).logits
    assert float(logits_error(actual, expected).max()) < 1e-3
    turned = any(any(find_rotation(model, index).sign) for index in range(2))
    assert turned, "this model turns nothing: this proves nothing"


def test_layers_that_turn_nothing_are_told_from_those_that_do():
    model = tiny(MODELS["smollm3"])
    assert [any(find_rotation(model, index).sign) for index in range(2)] == [True, False]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_change_with_the_length_are_asked_for_anew(kind):
    """Keys keep the angles of their time, in any cache of transformers; what moves the sinks are those of the query."""
    rope = {"rope_type": kind, **ROPE}
    if kind == "dynamic":
        rope["factor"] = 4.0
    else:
        factors = {"short_factor": [1.0] * 8, "long_factor": [float(2 + index) for index in range(8)]}
        rope |= {**factors, "factor": 4.0, "original_max_position_embeddings": 32}
    model = tiny({"max_position_embeddings": 32, "rope_parameters": rope})
    cache = hfkv.make_cache("sink", model, window_length=8, sink_length=3)
    rotation = cache.layers[0].window.rotation
    before = rotation.angles()
    assert before == pytest.approx(find_rotation(tiny({}), 0).angles, rel=1e-5)
    feed(model, cache, ids_of(80), 1)
    after = rotation.angles()
    angles = model.model.rotary_emb.inv_freq.tolist()
    assert after == pytest.approx(angles, rel=1e-5)
    assert after[-1] < before[-1] * 0.9
    assert copy.deepcopy(cache).layers[0].window.rotation.angles() == after
    loaded = pickle.loads(pickle.dumps(cache))
    with pytest.raises(NotImplementedError, match='Fix: positions="absolute"'):
        feed(model, loaded, ids_of(1), 1)


def test_an_attention_factor_does_not_scale_twice():
    model = tiny(MODELS["yarn"])
    assert model.model.rotary_emb.attention_scaling > 1.1
    query = torch.randn(1, 4, 3, 16)
    moved = find_rotation(model, 0).move(query, torch.tensor([[0, 5, 4000]]))
    assert torch.allclose(moved.norm(dim=-1), query.norm(dim=-1), atol=1e-5)
    assert torch.allclose(moved[:, :, 0], query[:, :, 0])
    assert not torch.allclose(moved[:, :, 1], query[:, :, 1], atol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_is_understood(dtype):
    model = tiny({}).to(dtype)
    assert find_rotation(model, 1).pair == find_rotation(tiny({}), 1).pair
    # rounded with the model, as its own queries see them
    assert find_rotation(model, 1).angles == pytest.approx(model.model.rotary_emb.inv_freq.tolist(), rel=1e-6)


def test_asking_leaves_the_model_as_it_was():
    model = tiny(MODELS["dynamic, within its length"]).train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    find_rotation(model, 0)
    assert model.training
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_model_without_rotary_embedding_is_refused_by_name_and_takes_absolute_positions(family):
    names = {"gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4}, "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64}}
    model = tiny({"model_type": family, **names[family]})
    with pytest.raises(NotImplementedError, match=r'no rotary embedding .*Fix: positions="absolute"'):
        hfkv.make_cache("sink", model)
    options = {"window_length": 8, "sink_length": 2, "positions": "absolute"}
    ids = ids_of(50)
    by_token = feed(model, hfkv.make_cache("sink", model, **options), ids, 1)
    at_once = feed(model, hfkv.make_cache("sink", model, **options), ids, 50)
    assert float(logits_error(at_once, by_token).max()) < 1e-3


def test_a_config_alone_cannot_say_and_the_error_says_what_can():
    model = tiny({})
    options = {"window_length": 8, "sink_length": 2}
    cache = hfkv.make_cache("sink", model.config, **options)
    feed(model, cache, ids_of(10), 10)
    with pytest.raises(NotImplementedError, match=r"Fix: hfkv.make_cache\(name, model\), or positions=\"absolute\""):
        feed(model, cache, ids_of(1), 1)
    feed(model, hfkv.make_cache("sink", model.config, **options, positions="absolute"), ids_of(30), 7)
    feed(model, hfkv.make_cache("window", model.config, window_length=8), ids_of(30), 7)


def test_an_encoder_decoder_without_rotary_embedding_is_refused():
    with pytest.raises(NotImplementedError, match=r'T5ForConditionalGeneration .*Fix: positions="absolute"'):
        hfkv.make_cache("sink", load("t5", "sdpa").model)


def test_attention_of_a_model_s_own_is_refused_when_it_meets_a_window():
    """Bloom computes attention in its own code, which can only see keys as they come."""
    config = transformers.BloomConfig(
        vocab_size=96, hidden_size=64, n_layer=2, n_head=4, pad_token_id=0, bos_token_id=None, eos_token_id=None
    )
    model = transformers.BloomForCausalLM(config).eval()
    cache = hfkv.make_cache("window", model, window_length=8)
    with pytest.raises(NotImplementedError, match="a model whose attention is its own takes no windows"):
        feed(model, cache, ids_of(40), 7)
