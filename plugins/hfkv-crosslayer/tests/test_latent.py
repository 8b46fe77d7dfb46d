"""Multi-head latent attention: transformers caches the latent as keys and the rotary key as values, of one head.

The models are dense: an error that sends a token to other experts says nothing of the cache.
"""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import hfkv
from hfkv.integration import cache_argument
from hfkv.testing.models import FAMILIES, VOCABULARY, logits_error
from hfkv_crosslayer.reference import reference

LAYERS, TOKENS = 4, 40
PACKING = {"group_size": 8, "residual_length": 8, "sink_length": 2}
MODELS = ("deepseek_v2", "deepseek_v3")


@functools.cache
def model(model_type):
    torch.manual_seed(0)
    deeper = {"num_hidden_layers": LAYERS, "first_k_dense_replace": LAYERS}
    config = AutoConfig.for_model(vocab_size=VOCABULARY, **FAMILIES[model_type] | deeper)
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def decoded(model_type, cache):
    """Logits of 8 tokens in a prompt and the others one by one."""
    ids = torch.randint(1, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    pieces = [ids[:, :8], *ids[:, 8:].split(1, dim=1)]
    this = model(model_type)
    return ids, torch.cat([this(piece, **{cache_argument(this): cache}).logits for piece in pieces], dim=1)


@pytest.mark.parametrize("model_type", MODELS)
def test_latents_are_shared_by_layers(model_type):
    this = model(model_type)
    cache = hfkv.make_cache("crosslayer", this)
    ids, actual = decoded(model_type, cache)
    with torch.no_grad():
        expected = this(ids, **{cache_argument(this): reference(this, {})}).logits
    assert float(logits_error(actual, expected).max()) < 1e-4
    plain = DynamicCache(config=this.config)
    decoded(model_type, plain)
    assert 2 * hfkv.memory(cache).stored_bytes == hfkv.memory(plain).stored_bytes
    both = hfkv.make_cache("crosslayer", this, store="kivi", store_config={"nbits": 8, **PACKING})
    assert float(logits_error(decoded(model_type, both)[1], expected).max()) < 0.02
    assert hfkv.memory(both).stored_bytes < hfkv.memory(cache).stored_bytes
