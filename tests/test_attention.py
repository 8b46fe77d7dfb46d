"""What the attention function "sdpa" becomes: fused on packed handles, transformers' own on everything else."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hfkv
from hfkv import attention
from hfkv.cache import KVHandle
from hfkv.integration import cache_argument

SMALL = {"nbits": 8, "group_size": 8, "residual_length": 8, "sink_length": 2}


@pytest.fixture
def handles(tiny):
    """An attention module, a query of three tokens, and the handles of 33 keys and values, most of them packed."""
    model = tiny("llama").model
    cache = hfkv.make_cache("kivi", model, **SMALL)
    with torch.no_grad():
        model(torch.arange(1, 31)[None], **{cache_argument(model): cache})
    torch.manual_seed(0)
    states = torch.randn(2, 1, 2, 3, 16)
    keys, values = cache.update(states[0], states[1], 0)
    assert isinstance(keys, KVHandle)
    return model.model.layers[0].self_attn, torch.randn(1, 4, 3, 16), keys, values


CAUSAL = torch.ones(3, 33, dtype=torch.bool).tril(30)[None, None]
SOME = torch.rand(1, 1, 3, 33, generator=torch.Generator().manual_seed(0)) > 0.3


@pytest.mark.parametrize(
    "mask", [CAUSAL, SOME, torch.zeros(SOME.shape).masked_fill(~SOME, -1e9)], ids=["causal", "some", "added"]
)
@pytest.mark.parametrize(
    "arguments", [{}, {"scaling": 0.3}, {"position_bias": torch.ones(1, 4, 3, 33).cumsum(-1) / 9}], ids=" ".join
)
def test_equals_the_original_on_dequantized_states(handles, mask, arguments):
    module, query, keys, values = handles
    found, _ = attention.wrap(sdpa_attention_forward)(module, query, keys, values, mask, **arguments)
    expected, _ = sdpa_attention_forward(module, query, keys.dense(), values.dense(), mask, **arguments)
    assert torch.allclose(found, expected, atol=1e-5)


def test_without_a_mask_a_query_sees_what_came_before_it(handles):
    module, query, keys, values = handles
    found, _ = attention.wrap(sdpa_attention_forward)(module, query, keys, values, None)
    expected, _ = sdpa_attention_forward(module, query, keys.dense(), values.dense(), CAUSAL)
    assert torch.allclose(found, expected, atol=1e-5)
    all_of_them, _ = attention.wrap(sdpa_attention_forward)(module, query, keys, values, None, is_causal=False)
    expected, _ = sdpa_attention_forward(module, query, keys.dense(), values.dense(), torch.ones_like(CAUSAL))
    assert torch.allclose(all_of_them, expected, atol=1e-5)


def test_the_packed_states_are_not_dequantized(handles, monkeypatch):
    module, query, keys, values = handles
    monkeypatch.setattr(KVHandle, "dense", lambda handle: pytest.fail("dequantized"))
    attention.wrap(sdpa_attention_forward)(module, query, keys, values, CAUSAL)


def test_plain_tensors_go_to_the_original():
    seen = []

    def original(*args, **kwargs):
        seen.append((args, kwargs))
        return "theirs"

    states = torch.zeros(1, 1, 1, 1)
    assert attention.wrap(original)(None, states, states, states, None, 0.1, scaling=2.0) == "theirs"
    assert seen == [((None, states, states, states, None, 0.1), {"scaling": 2.0})]


def test_softcap_is_left_to_the_original(handles):
    """Refused since transformers 5.24, ignored before."""
    module, query, keys, values = handles

    def outcome(function, *states):
        try:
            return function(module, query, *states, CAUSAL, softcap=1.0)[0].tolist()
        except ValueError as error:
            return str(error)

    expected = outcome(sdpa_attention_forward, keys.dense(), values.dense())
    assert outcome(attention.wrap(sdpa_attention_forward), keys, values) == expected


def test_a_mask_of_the_new_tokens_only_is_refused(handles):
    module, query, keys, values = handles
    with pytest.raises(ValueError, match="the attention mask covers 3 tokens and the cache holds 33"):
        attention.wrap(sdpa_attention_forward)(module, query, keys, values, CAUSAL[..., -3:])
