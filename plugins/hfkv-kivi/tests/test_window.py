"""A window over packed blocks, and the packed local layers of hybrid models."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hfkv
from hfkv.cache import KVHandle, WindowHandle
from hfkv.integration import cache_argument
from hfkv.testing.forgetting import forgetting
from hfkv.testing.models import WINDOW, load, logits_error

SMALL = {"nbits": 8, "group_size": 8, "residual_length": 8, "sink_length": 2}


def windowed(model, **options):
    return hfkv.make_cache("kivi", model, **{**SMALL, "window_length": 24, **options})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("positions", ["cache", "absolute"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_are_those_of_the_kept_tokens_at_their_positions(family, attention, positions):
    tiny = load(family, attention)
    ids = tiny.prompt(rows=2, length=90)
    cache = windowed(tiny.model, positions=positions)
    actual = torch.cat(
        [tiny.feed(cache, ids[:, :33]), tiny.feed(cache, ids[:, :52], 7), tiny.feed(cache, ids, 1)], dim=1
    )
    patterns = {index: layer.attended(90) for index, layer in enumerate(cache.layers)}
    with forgetting(tiny.model, patterns):
        expected = tiny.logits(ids)
    error = logits_error(actual, expected)
    assert float(error[:, :33].max()) < 1e-3, "the tokens of the current forward are exact"
    assert float(error.max()) < 0.2 * tiny.cost_of_a_token
    assert float(logits_error(actual, tiny.logits(ids)).max()) > tiny.cost_of_a_token, "nothing was forgotten"


def test_blocks_behind_the_window_are_freed():
    """Bytes by formula: sinks and residual in full precision, at most one block more than the window in 8 bits."""
    tiny = load("llama", "sdpa")
    cache = windowed(tiny.model, sink_length=4, window_length=264)
    # 2 KV heads of 16 channels; a block is 8 tokens of codes, a scale and an offset per 8 of them
    block = 2 * 8 * 16 * (1 + 4 / 8) * 2
    exact = (4 + 8 + 8) * 2 * 16 * 4 * 2
    for length in (400, 1000, 1001, 1004, 1100):
        tiny.feed(cache, tiny.prompt(length=length), chunk=64)
        report = hfkv.memory(cache)
        (layer, *_) = report.layers
        assert (layer.seen, layer.tokens) == (length, 268)
        assert layer.full_precision_bytes == exact
        # 264 - 8 tokens of the window, and part of a block; freed blocks and room to grow, at most four of each
        assert 32 * block <= layer.packed_bytes <= (32 + 1 + 4 + 4) * block


def test_a_long_prompt_packs_only_what_the_window_keeps():
    tiny = load("llama", "sdpa")
    cache = windowed(tiny.model)
    tiny.feed(cache, tiny.prompt(length=1000))
    (layer, *_) = hfkv.memory(cache).layers
    assert layer.packed_bytes <= 3 * 2 * 8 * 16 * (1 + 4 / 8) * 2


def test_packed_windows_are_read_by_the_fused_kernel(monkeypatch):
    tiny = load("llama", "sdpa")
    cache = windowed(tiny.model)
    ids = tiny.prompt(length=80)
    tiny.feed(cache, ids[:, :60])
    monkeypatch.setattr(KVHandle, "dense", lambda handle: pytest.fail("dequantized"))
    kinds = set()
    original = type(cache.layers[0]).update

    def update(layer, *args, **kwargs):
        result = original(layer, *args, **kwargs)
        kinds.add(type(result[0]))
        return result

    monkeypatch.setattr(type(cache.layers[0]), "update", update)
    monkeypatch.setattr("hfkv.cache.view.KVView.dense", lambda view, name: pytest.fail("dequantized"))
    tiny.feed(cache, ids, chunk=1)
    assert kinds == {WindowHandle}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_local_layers_of_a_hybrid_model_are_packed_within_their_window(attention, chunk):
    tiny = load("gemma3", attention)
    ids = tiny.prompt(rows=2, length=60)
    ids[1, :5] = 0
    options = {**SMALL, "group_size": 8, "residual_length": 8}
    plain = tiny.plain_cache()
    expected = torch.cat([tiny.feed(plain, ids[:, :40], chunk), tiny.feed(plain, ids, 1)], dim=1)
    caches = [hfkv.make_cache("kivi", tiny.model, **options, quantize_sliding=asked) for asked in (True, False)]
    for cache in caches:
        actual = torch.cat([tiny.feed(cache, ids[:, :40], chunk), tiny.feed(cache, ids, 1)], dim=1)
        assert float(logits_error(actual, expected)[0].max()) < 0.2 * tiny.cost_of_a_token
        assert float(logits_error(actual, expected)[1, 5:].max()) < 0.2 * tiny.cost_of_a_token
    assert [layer.kind for layer in hfkv.memory(caches[0]).layers] == ["KiviLayer"] * 4
    local = hfkv.memory(caches[0]).layers[0]
    assert local.tokens == WINDOW
    assert local.packed_bytes > 0
    assert caches[0].is_sliding == [True, False, True, False]


HYBRID = {
    "gemma2": {"layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16},
    "gpt_oss": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "head_dim": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
    },
    # every layer is local
    "mistral": {},
}


@pytest.mark.parametrize("family", HYBRID)
def test_local_layers_keep_their_own_window_packed_or_not(family):
    """Scores that are bounded, a logit that takes attention away, and a model of windows alone."""
    config = AutoConfig.for_model(
        family, vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=16, initializer_range=0.1, pad_token_id=0, **HYBRID[family],
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(1, 96, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    for packs in (False, True):
        if family == "mistral" and not packs:
            with pytest.raises(NotImplementedError, match="works on full-attention layers, and MistralConfig has none"):
                hfkv.make_cache("kivi", model, **SMALL)
            continue
        cache = hfkv.make_cache("kivi", model, **SMALL, quantize_sliding=packs)
        with torch.no_grad():
            parts = [model(part, **{cache_argument(model): cache}).logits for part in ids.split([20, 9, *[1] * 21], 1)]
        assert float(logits_error(torch.cat(parts, dim=1), expected).max()) < 0.05
        local = hfkv.memory(cache).layers[0]
        assert local.tokens == 16
        assert (local.packed_bytes > 0) is packs


def test_techniques_mixed_by_layer():
    """One layer in three in 8 bits with all tokens, windows with sinks elsewhere."""
    tiny = load("llama", "sdpa")
    layers = {"1-2": {"cache": "sink", "window_length": 16, "sink_length": 2}}
    ids = tiny.prompt(rows=2, length=80)
    ids[0, :9] = 0
    caches = [hfkv.make_cache("kivi", tiny.model, **SMALL, layers=layers) for _ in range(2)]
    one, chunks = tiny.feed(caches[0], ids, 1), tiny.feed(caches[1], ids, 11)
    assert float(logits_error(one, chunks)[1].max()) < 0.2 * tiny.cost_of_a_token
    report = hfkv.memory(caches[0])
    assert [(layer.kind, layer.tokens) for layer in report.layers] == [
        ("KiviLayer", 80),
        ("SinkLayer", 18),
        ("SinkLayer", 18),
    ]
    patterns = {index: layer.attended(71) for index, layer in enumerate(caches[0].layers) if layer.attended(71)}
    assert set(patterns) == {1, 2}
    with forgetting(tiny.model, patterns):
        expected = tiny.logits(ids[:1, 9:])
    assert float(logits_error(one[:1, 9:], expected).max()) < 0.2 * tiny.cost_of_a_token


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"window_length": 12},
            r"window_length=12 with residual_length=8 and group_size=8 leaves nothing to pack: use .*16",
        ),
        ({"positions": "cache"}, r"positions='cache' is about a window: set window_length"),
        (
            {"window_length": 64, "positions": "far"},
            r"positions='far' is not supported. Choose from: 'cache', 'absolute'",
        ),
        ({"quantize_sliding": "yes"}, r"quantize_sliding='yes' is not supported. Choose from: False, True"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        hfkv.make_cache("kivi", load("llama", "sdpa").model, **SMALL, **options)
