"""Multi-head latent attention (DeepSeek-V2 and V3): caches are given a latent as keys and a rotary key as values.

The conformance kit runs every cache's own contracts on such models; here are the settings that it does not ask for.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hfkv
from hfkv import registry
from hfkv.testing.cases import CacheCase
from hfkv.testing.models import load, logits_error
from hfkv.testing.oracle import LOSSLESS, Judge

MODELS = ("deepseek_v2", "deepseek_v3")
TOKENS, LATENT, ROTARY = 40, 24, 8
PACKING = {"group_size": 8, "residual_length": 8, "sink_length": 2}
every_model = pytest.mark.parametrize("family", MODELS)


def settings(cache, **options):
    spec = registry.manager().specs(hfkv.CacheSpec)[cache]
    return CacheCase(spec, "latents", options, cache)


def error_of(case, family, chunk=8):
    """The largest error of the logits in a loop of chunks and then tokens, against a forward without a cache."""
    judge = Judge(case, family, "sdpa")
    ids = judge.tiny.prompt(rows=2, length=TOKENS)
    cache = judge.cache()
    parts = [judge.tiny.feed(cache, ids[:, : TOKENS // 2], chunk), judge.tiny.feed(cache, ids, chunk=1)]
    return float(logits_error(torch.cat(parts, dim=1), judge.logits(ids)).max()), cache


@pytest.mark.parametrize(
    ("backend", "widths"),
    [
        pytest.param(
            name,
            spec.nbits,
            marks=pytest.mark.skipif(bool(registry.unmet(spec)), reason=f"{name} needs {registry.unmet(spec)}"),
            id=name,
        )
        for name, spec in registry.manager().specs(hfkv.KVQuantizerSpec).items()
    ],
)
@every_model
def test_latents_are_packed_in_every_codec_and_width(family, backend, widths):
    """Each bit more brings the logits nearer, and the bytes are those of the formula."""
    errors = {}
    for nbits in widths:
        errors[nbits], cache = error_of(settings("kivi", backend=backend, nbits=nbits, **PACKING), family)
        keys, values = cache.layers[0].dense()
        assert (keys.shape, values.shape) == ((2, 1, TOKENS, LATENT), (2, 1, TOKENS, ROTARY))
        exact = (2 + 8 + 8) * (LATENT + ROTARY) * 4
        # of a block, keys: a group per channel; values: a group per token
        blocks = (TOKENS - 2 - 8) // 8
        packed = blocks * (LATENT * (nbits + 4) + 8 * (ROTARY * nbits // 8 + 4))
        # the room to grow of packed blocks is four at least: the first three came with the prompt
        stored = [size for _, size in cache.layers[0].segments()]
        assert stored[0] == 2 * exact
        assert 2 * packed <= stored[1] <= 2 * packed * (blocks + 4) // blocks
        assert hfkv.memory(cache).stored_bytes == sum(stored) * len(cache.layers)
    in_order = [errors[nbits] for nbits in sorted(errors)]
    assert in_order == sorted(in_order, reverse=True)
    assert errors[max(errors)] < 0.02


@pytest.mark.parametrize(
    ("cache", "options", "allowed"),
    [
        ("kivi", {"nbits": 8, "hierarchical": True, **PACKING}, 0.02),
        ("kivi", {"nbits": 8, "group_size": 8, "residual_length": 0, "sink_length": 0}, 0.02),
        ("kivi", {"nbits": 8, "key_axis": "token", "value_axis": "channel", **PACKING}, 0.02),
        ("kivi", {"nbits": 8, "window_length": 17, **PACKING}, 0.02),
        ("kivi", {"nbits": 8, "window_length": 17, "positions": "absolute", **PACKING}, 0.02),
        ("kivi", {"nbits": 8, "layers": {"0": {"cache": "sink", "window_length": 12}}, **PACKING}, 0.02),
        ("kivi", {"nbits": 8, "layers": {"0": "dynamic"}, **PACKING}, 0.02),
        ("sink", {"window_length": 12, "sink_length": 3, "layers": {"1": "dynamic"}}, LOSSLESS),
        ("sink", {"window_length": 12, "sink_length": 3, "positions": "absolute"}, LOSSLESS),
        ("crosslayer", {"store": "kivi", "store_config": {"nbits": 8, **PACKING}}, 0.02),
    ],
    ids=lambda value: str(value).replace(" ", "") if isinstance(value, str | dict) else "",
)
@every_model
def test_every_setting_is_right_on_latents(family, cache, options, allowed):
    case = settings(cache, **options)
    for chunk in (3, 20):
        assert error_of(case, family, chunk)[0] < allowed


@pytest.mark.parametrize("assistant", ["lookup", "self-kv"])
@pytest.mark.parametrize(
    ("cache", "options"), [("kivi", {"nbits": 8, **PACKING}), ("sink", {"window_length": 11, "sink_length": 3})]
)
def test_assistants_draft_from_latents(cache, options, assistant):
    tiny = load("deepseek_v3", "sdpa")
    ids = tiny.prompt(length=6).repeat(1, 4)
    asked = {"cache_implementation": cache, "cache_config": options}
    plain, drafted = (tiny.generate(ids, **asked, **more) for more in ({}, hfkv.assistant(assistant, tiny.model)))
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert hfkv.stats(drafted).drafted > 0, "nothing was drafted: this proves nothing"


@pytest.mark.parametrize("name", registry.manager().specs(hfkv.CacheSpec))
def test_layers_that_choose_tokens_by_an_indexer_are_refused(name):
    """DeepSeek-V3.2 caches what its indexer reads besides: transformers' layer for that is not ours to replace."""
    config = AutoConfig.for_model("deepseek_v32", num_hidden_layers=2)
    with pytest.raises(NotImplementedError, match=rf"'{name}' .*DeepseekV32Config has none .*Fix: leave out"):
        hfkv.make_cache(name, config)


@every_model
def test_windows_free_latents(family):
    """Bytes stay those of the sinks, the window and the room of an eighth, in latents."""
    judge = Judge(settings("sink", window_length=16, sink_length=4), family, "sdpa")
    cache = judge.cache()
    for length in (50, 200):
        judge.tiny.feed(cache, judge.tiny.prompt(rows=2, length=length))
        assert hfkv.memory(cache).stored_bytes == 2 * 2 * (4 + 16 + 2) * (LATENT + ROTARY) * 4


@every_model
def test_a_window_that_no_model_was_made_for_says_what_to_do(family):
    """Made from a config alone, a cache cannot teach the model's class to read it."""
    code = AutoConfig.for_model(**load(family, "sdpa").model.config.to_dict())
    hfkv.deactivate()
    hfkv.activate()
    model = AutoModelForCausalLM.from_config(code).eval()
    cache = hfkv.make_cache("window", model.config, window_length=12)
    tiny = load(family, "sdpa")
    with pytest.raises(NotImplementedError, match=r"hfkv\.make_cache\(name, model\)"):
        tiny.feed(cache, tiny.prompt(length=TOKENS))
