"""A ``cache_config`` that was written for transformers' "quantized" cache means the same with "kivi"."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, QuantizedCache

import hfkv
from hfkv.integration import cache_argument

BACKEND = "hqq"
WIDTHS = (2, 3, 4, 8)
AXES = {0: "channel", 1: "token"}
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


# transformers stores 3 bits with axis 1, and then fails to read them
@pytest.mark.parametrize(("nbits", "axis"), [(2, 0), (3, 0), (4, 0), (8, 0), (2, 1), (4, 1), (8, 1)])
def test_reconstruction_is_as_near_as_that_of_transformers(nbits, axis):
    cache_config = {"backend": BACKEND, "nbits": nbits, "axis_key": axis, "axis_value": axis, "q_group_size": 32}
    # one block of one head: with axis 0 transformers' groups of more than that are spread over heads and tokens
    states = torch.randn(1, 1, 32, 64, generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(in_kivi(cache_config, states), in_transformers(cache_config, states), strict=True):
        # they stop all groups at once, which can suit a few groups better and makes rows depend on one another; and
        # they keep offsets in the dtype of the states, where float16 is coarse beside the steps of 8 bits
        assert (ours - states).abs().mean() < (1.05 if nbits == 8 else 1.02) * (theirs - states).abs().mean()


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


@pytest.mark.parametrize("refused", [{"axis_key": -1}, {"axis_value": 2}, {"backend": "Hqq"}, {"backend": "HQQ"}])
def test_what_transformers_refuses_is_refused_with_the_choices(refused):
    cache_config = {"backend": BACKEND, **refused}
    with pytest.raises(ValueError, match=r"has to be one of|Unknown quantization backend"):
        QuantizedCache(config=CONFIG, **cache_config)
    with pytest.raises(ValueError, match=r"Choose from: (0, 1|.*hqq.*Did you mean 'hqq')"):
        hfkv.make_cache("kivi", CONFIG, **cache_config)
