"""What attention is handed, and the errors of it, against attention written out."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import hfkv
from hfkv.testing.models import load
from hfkv_lab.attention_error import attention_errors, relative
from hfkv_lab.recording import record, recording


def attention(query, key, value):
    """Causal attention of the last tokens, in double precision."""
    heads = query.shape[1] // key.shape[1]
    key, value = (states.double().repeat_interleave(heads, dim=1) for states in (key, value))
    scores = query.double() @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    queries, tokens = scores.shape[2:]
    hidden = torch.ones(queries, tokens, dtype=torch.bool).triu(tokens - queries + 1)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value).transpose(1, 2)


@pytest.fixture
def ids():
    return torch.randint(0, 96, (1, 70), generator=torch.Generator().manual_seed(0))


def test_recorded_calls_are_the_models_own(small, ids):
    before = small.config._attn_implementation
    calls = record(small, ids, 6)
    assert small.config._attn_implementation == before
    assert [call.layer for call in calls] == [0, 1, 2]
    cache = DynamicCache(config=small.config)
    with torch.no_grad():
        small(ids, **{hfkv.integration.cache_argument(small): cache})
    for call, layer in zip(calls, cache.layers, strict=True):
        torch.testing.assert_close(call.key, layer.keys)
        torch.testing.assert_close(call.value, layer.values)
        assert call.query.shape == (1, 4, 6, 16)
        expected = attention(call.query, call.key, call.value)
        torch.testing.assert_close(call.output(call.key, call.value).double(), expected, rtol=1e-4, atol=1e-5)
        weights = call.weights(call.key)
        by_weights = (weights @ call.value.repeat_interleave(2, dim=1)).transpose(1, 2)
        torch.testing.assert_close(by_weights.double(), expected, rtol=1e-4, atol=1e-5)


def test_recording_changes_nothing_the_model_computes(small, ids):
    with torch.no_grad():
        expected = small(ids).logits
        with recording(small) as recorder:
            torch.testing.assert_close(small(ids).logits, expected)
            assert len(recorder.calls) == 3
            small(ids)
            assert len(recorder.calls) == 6
        small(ids)
    assert len(recorder.calls) == 6


def test_recording_stops_after_an_error(small, ids):
    before = small.config._attn_implementation
    with pytest.raises(RuntimeError, match="in between"), recording(small):
        raise RuntimeError("in between")
    assert small.config._attn_implementation == before


def test_plain_cache_has_no_error(small, ids):
    for error in attention_errors(record(small, ids, 6), DynamicCache(config=small.config)):
        assert (error.keys, error.values, error.output) == (0, 0, 0)


@pytest.mark.parametrize("nbits", [2, 8])
def test_errors_are_those_of_what_the_cache_holds(small, ids, nbits):
    options = {"nbits": nbits, "group_size": 8, "residual_length": 0, "sink_length": 0}
    calls = record(small, ids, 6)
    errors = attention_errors(calls, hfkv.make_cache("kivi", small, **options))
    other = hfkv.make_cache("kivi", small, **options)
    for call, error in zip(calls, errors, strict=True):
        # of the first 64 tokens, 8 blocks are packed; the last 6 are exact
        other.update(call.key[:, :, :64].clone(), call.value[:, :, :64].clone(), call.layer)
        key, value = (
            torch.cat([dense, exact[:, :, 64:]], dim=2)
            for dense, exact in zip(other.layers[call.layer].dense(), (call.key, call.value), strict=True)
        )
        exact = attention(call.query, call.key, call.value)
        assert error.keys == pytest.approx(relative(key, call.key), rel=1e-5)
        assert error.values == pytest.approx(relative(value, call.value), rel=1e-5)
        assert error.from_keys == pytest.approx(relative(attention(call.query, key, call.value), exact), rel=1e-3)
        assert error.from_values == pytest.approx(relative(attention(call.query, call.key, value), exact), rel=1e-3)
        assert error.output == pytest.approx(relative(attention(call.query, key, value), exact), rel=1e-3)


def test_layers_that_see_a_window_are_left_out(ids):
    model = load("gemma3", "sdpa").model
    errors = attention_errors(record(model, ids, 6), hfkv.make_cache("kivi", model, group_size=8, residual_length=0))
    assert [error.layer for error in errors] == [1, 3]


class Forgets(DynamicCache):
    """Hands out the newest 20 tokens."""

    def update(self, *args, **kwargs):
        return tuple(states[:, :, -20:] for states in super().update(*args, **kwargs))


def test_cache_that_leaves_tokens_out_has_no_errors_one_by_one(small, ids):
    assert attention_errors(record(small, ids, 6), Forgets(config=small.config)) == []
