"""Training that sees a cache: forwards equal decoding from the real one, gradients pass the rounding."""

from __future__ import annotations

import copy

import pytest
import torch

import hfkv
from hfkv.integration import cache_argument
from hfkv.testing.models import load
from hfkv_distill.cache_aware import CacheView, packed_tokens, seeing, straight_through

OPTIONS = {"nbits": 2, "group_size": 8, "residual_length": 8, "sink_length": 2}


@torch.no_grad()
def decoded(model, ids, options):
    """Logits of decoding token by token from the real cache."""
    cache = hfkv.make_cache("kivi", model, **options)
    steps = [model(input_ids=token, **{cache_argument(model): cache}).logits for token in ids.split(1, dim=1)]
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        {**OPTIONS, "residual_length": 0, "sink_length": 0},
        {**OPTIONS, "layers": {"-1": {"nbits": 4, "residual_length": 3}}},
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_forward_is_decoding_from_the_real_cache(family, options):
    tiny = load(family, "sdpa")
    # float64: of two forwards that add in another order, float32 would round some states to other codes
    model, ids = copy.deepcopy(tiny.model).double(), tiny.prompt(rows=2, length=45)
    expected = decoded(model, ids, options)
    plain = model(input_ids=ids).logits
    with torch.no_grad(), seeing(model, CacheView(model, "kivi", options)):
        actual = model(input_ids=ids).logits
    assert (actual - expected).abs().max() < 1e-5 * expected.std()
    # and the cache does cost something
    assert (plain - expected).abs().max() > 0.05 * expected.std()
    assert model.config._attn_implementation == "sdpa"


def test_what_a_query_sees_is_what_the_cache_has_packed(llama):
    model = llama(0)
    cache = hfkv.make_cache("kivi", model, **OPTIONS)
    view = CacheView(model, "kivi", OPTIONS)
    states = torch.randn(1, 2, 1, 8)
    for seen in range(1, 60):
        cache.layers[0].update(states, states)
        assert cache.layers[0]._packed_length == int(packed_tokens(torch.tensor(seen), view.layers[0]))


def test_values_are_those_that_the_cache_dequantizes(llama):
    model = llama(0)
    cache = hfkv.make_cache("kivi", model, **OPTIONS)
    layer = cache.layers[0]
    keys, values = torch.randn(2, 1, 2, 26, 8)
    layer.update(keys, values)
    packed = slice(2, 2 + layer._packed_length)
    assert layer._packed_length == 16
    dense = layer.dense()
    ours = straight_through(keys[:, :, packed], layer.key_format(8), layer.quantizer)
    assert torch.allclose(ours, dense[0][:, :, packed], atol=1e-6)
    ours = straight_through(values[:, :, packed], layer.value_format(8), layer.quantizer)
    assert torch.allclose(ours, dense[1][:, :, packed], atol=1e-6)


def test_gradient_passes_the_rounding(llama):
    layer = hfkv.make_cache("kivi", llama(0), **OPTIONS).layers[0]
    keys = torch.randn(1, 2, 16, 8, requires_grad=True)
    rounded = straight_through(keys, layer.key_format(8), layer.quantizer)
    weight = torch.randn_like(keys)
    (rounded * weight).sum().backward()
    assert torch.allclose(keys.grad, weight)
    assert (rounded - keys).abs().max() > 0.1


def test_padding_on_the_right_changes_no_real_token(llama):
    model, options = llama(0), {**OPTIONS, "residual_length": 0}
    ids = torch.randint(2, 48, (1, 40))
    padded = torch.cat([ids, torch.zeros(1, 9, dtype=torch.long)], dim=1)
    with torch.no_grad(), seeing(model, CacheView(model, "kivi", options)):
        alone = model(input_ids=ids).logits
        beside = model(input_ids=padded, attention_mask=(torch.arange(49) < 40).long()[None]).logits
    assert torch.allclose(alone, beside[:, :40], atol=1e-5)


def test_training_lowers_what_the_cache_costs(trainer, llama):
    # a copy of the teacher: all that there is to learn is to bear the cache
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(2, 48, (48,), generator=generator)} for _ in range(8)]
    made = trainer(
        llama(0, num_hidden_layers=3), llama(0, num_hidden_layers=3), rows, evaluated=rows, max_steps=30,
        per_device_train_batch_size=8, learning_rate=2e-3, train_cache="kivi",
        train_cache_config={**OPTIONS, "residual_length": 0, "sink_length": 0},
    )  # fmt: skip
    before = made.evaluate()["eval_kl"]
    made.train()
    assert made.evaluate()["eval_kl"] < 0.8 * before
    assert before > 0.01


def test_what_training_cannot_see(llama, trainer):
    with pytest.raises(NotImplementedError, match="window"):
        CacheView(llama(0), "kivi", {"window_length": 200})
    with pytest.raises(ValueError, match="nbit"):
        CacheView(llama(0), "kivi", {"nbit": 2})
    with pytest.raises(ValueError, match="train_cache_config"):
        trainer(train_cache_config={"nbits": 2})
    model = llama(0)
    model.set_attn_implementation("eager")
    with pytest.raises(NotImplementedError, match="eager"), seeing(model, CacheView(model, "kivi")):
        pass
