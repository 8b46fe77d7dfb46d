"""A ``cache_config`` that was written for transformers' "quantized" cache means the same with "kivi"."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, QuantizedCache

import hfkv
from hfkv.integration import cache_argument

BACKEND = "quanto"
WIDTHS = (2, 4)
AXES = {0: "token", -1: "channel"}
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    pad_token_id=0,
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


def in_transformers(cache_config, states):
    cache = QuantizedCache(config=CONFIG, **cache_config)
    cache.update(states, states, 0)
    layer = cache.layers[0]
    return layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values)


def in_kivi(cache_config, states):
    # nothing in full precision: transformers packs the whole prompt
    cache = hfkv.make_cache("kivi", CONFIG, **{**cache_config, "residual_length": 0, "sink_length": 0})
    cache.update(states, states, 0)
    return cache.layers[0].keys, cache.layers[0].values


@pytest.mark.parametrize(("axis_key", "axis_value"), list(itertools.product(AXES, AXES)))
def test_axis_numbers_group_what_they_group_in_transformers(axis_key, axis_value):
    cache_config = {"backend": BACKEND, "nbits": 4, "axis_key": axis_key, "axis_value": axis_value, "q_group_size": 32}
    plain = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0))
    for outlier, index in {"channel": (..., 5), "token": (..., 7, slice(None))}.items():
        loud = plain.clone()
        loud[index] *= 100
        others = torch.ones_like(plain, dtype=torch.bool)
        others[index] = False

        def spoilt(restore, loud=loud, others=others):
            """Whether keys and values suffer where there is no outlier: their groups reach across it."""
            before, after = restore(cache_config, plain), restore(cache_config, loud)
            return [
                bool((dirty - loud)[others].abs().mean() > 3 * (clean - plain)[others].abs().mean())
                for clean, dirty in zip(before, after, strict=True)
            ]

        assert spoilt(in_kivi) == spoilt(in_transformers)
        assert spoilt(in_kivi) == [AXES[axis] != outlier for axis in (axis_key, axis_value)]


@pytest.mark.parametrize("nbits", WIDTHS)
@pytest.mark.parametrize("axis", AXES)
def test_reconstruction_is_that_of_transformers(nbits, axis):
    cache_config = {"backend": BACKEND, "nbits": nbits, "axis_key": axis, "axis_value": axis, "q_group_size": 32}
    states = torch.randn(2, 2, 64, 64, generator=torch.Generator().manual_seed(0))
    step = states.amax() * 2 / (2**nbits - 1)
    for ours, theirs in zip(in_kivi(cache_config, states), in_transformers(cache_config, states), strict=True):
        # float16 moves a level by little, and hardly any element to another level
        differs = (ours - theirs).abs() > states.abs().amax() * 2**-10
        assert differs.float().mean() < 0.005
        assert (ours - theirs).abs().max() < 1.1 * step


@pytest.mark.parametrize("residual_length", [1, 16, 128])
@pytest.mark.parametrize("q_group_size", [16, 32, 64])
@pytest.mark.parametrize(("axis_key", "axis_value"), list(itertools.product(AXES, AXES)))
@pytest.mark.parametrize("nbits", WIDTHS)
def test_config_works_unchanged(model, nbits, axis_key, axis_value, q_group_size, residual_length):
    cache_config = {
        "backend": BACKEND,
        "nbits": nbits,
        "axis_key": axis_key,
        "axis_value": axis_value,
        "q_group_size": q_group_size,
        "residual_length": residual_length,
    }
    before = copy.deepcopy(cache_config)
    QuantizedCache(config=CONFIG, **cache_config)
    output = model.generate(
        torch.ones(1, 70, dtype=torch.long),
        max_new_tokens=3,
        cache_implementation="kivi",
        cache_config=cache_config,
        return_dict_in_generate=True,
    )
    assert cache_config == before
    layer = output[cache_argument(model)].layers[0]
    assert layer.residual_length == residual_length
    assert [layer.key_format(64).nbits, layer.value_format(64).nbits] == [nbits, nbits]
    assert [layer.key_format(64).axis, layer.value_format(64).axis] == [AXES[axis_key], AXES[axis_value]]
    assert layer.key_format(64).group_size == q_group_size


@pytest.mark.parametrize("refused", [{"axis_key": 1}, {"axis_value": 2}, {"backend": "Quanto"}, {"backend": "QUANTO"}])
def test_what_transformers_refuses_is_refused_with_the_choices(refused):
    cache_config = {"backend": BACKEND, **refused}
    with pytest.raises(ValueError, match=r"has to be one of|Unknown quantization backend"):
        QuantizedCache(config=CONFIG, **cache_config)
    with pytest.raises(ValueError, match=r"Choose from: (0, -1|.*quanto.*Did you mean 'quanto')"):
        hfkv.make_cache("kivi", CONFIG, **cache_config)
