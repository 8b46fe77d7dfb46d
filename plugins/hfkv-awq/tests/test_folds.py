"""Scales are folded where a family of models makes its inputs: the model computes what it did."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
)

import hfkv
from hfkv.testing.weights import IDS, logits, small_model
from hfkv.weights.plan import plan
from hfkv_awq.calibrate import calibrate
from hfkv_awq.folds import FAMILIES, NormSource, RowSource, shared_inputs
from hfkv_awq.linear import AwqLinear

TEXT = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(0))


def model_of(kind: str) -> PreTrainedModel:
    """A random model of a family: two query heads for each value head, norms and biases that are not trivial."""
    torch.manual_seed(0)
    options = {"head_dim": 16} if "qwen2" not in kind else {}
    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        **options,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.dim() == 2:
                parameter.mul_(5)
    return model


def scaled(model, **options):
    """The model after the search, before anything is rounded."""
    config = hfkv.WeightConfig("awq", nbits=3, group_size=16, calibration_ids=TEXT, **options)
    targets = {name: target for name, (_, target) in plan(model, config).targets.items()}
    calibrate(model, AwqLinear, targets)
    return model


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_scaled_model_computes_what_it_did(kind):
    plain = model_of(kind)
    found = scaled(copy.deepcopy(plain))
    torch.testing.assert_close(logits(found), logits(plain), rtol=1e-4, atol=1e-4)
    before, after = dict(plain.named_parameters()), dict(found.named_parameters())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    layers = {name for name in before if name.startswith("model.layers") and name.endswith("proj.weight")}
    assert len(layers) == 14
    # nearly all: now and then no scale is better; of the norms, those that are divided
    assert len(layers & changed) >= 12
    assert sum("norm" in name for name in changed) == 4
    assert not any("embed" in name or name in ("model.norm.weight", "lm_head.weight") for name in changed)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rounding_of_the_norm_is_made_up_for(offset):
    norm = torch.nn.LayerNorm(64, bias=False, dtype=torch.bfloat16)
    norm.weight.data.copy_(torch.randn(64) - offset)
    norm.weight.data[3] = -offset
    before = norm.weight.detach().float() + offset
    reached = NormSource(norm, offset).divide(torch.rand(64) * 4 + 0.2)
    after = norm.weight.detach().float() + offset
    assert not torch.equal(before, after)
    # not the scale that was asked for, but the one that the norm really divides by
    torch.testing.assert_close(after * reached, before, rtol=1e-6, atol=0)
    # what the norm switches off
    assert (reached[3], after[3]) == (1, 0)


def test_value_head_is_divided_for_all_the_query_heads_that_read_it():
    linear = torch.nn.Linear(8, 6)
    source = RowSource(linear, head_dim=3, repeats=2)
    values = torch.arange(12.0)
    expected = torch.tensor([1.5, 2.5, 3.5, 1.5, 2.5, 3.5, 7.5, 8.5, 9.5, 7.5, 8.5, 9.5])
    assert torch.equal(source.shared(values), expected)
    states = torch.randn(5, 8)
    before = linear(states)
    source.divide(expected)
    torch.testing.assert_close(linear(states) * torch.tensor([1.5, 2.5, 3.5, 7.5, 8.5, 9.5]), before)


@pytest.mark.parametrize(
    ("options", "unscaled"),
    [
        ({"skip": ["lm_head", "v_proj"]}, ("q_proj", "k_proj", "v_proj", "o_proj", "input_layernorm")),
        ({"layers": {"up_proj": "skip"}}, ("gate_proj", "up_proj", "down_proj", "post_attention_layernorm")),
        ({"layers": {"k_proj": {"backend": "rtn"}}}, ("q_proj", "k_proj", "input_layernorm")),
    ],
)
def test_what_is_left_out_stays_as_it_is(options, unscaled):
    plain = small_model()
    model = hfkv.quantize_weights(
        copy.deepcopy(plain), hfkv.WeightConfig("awq", group_size=16, calibration_ids=TEXT, **options)
    )
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear or (name.rpartition(".")[2] in unscaled and "norm" in name):
            assert torch.equal(module.weight, plain.get_submodule(name).weight), name
    # the other part of the layer is scaled
    other = "post_attention_layernorm" if "input_layernorm" in unscaled else "input_layernorm"
    for layer, before in zip(model.model.layers, plain.model.layers, strict=True):
        assert not torch.equal(getattr(layer, other).weight, getattr(before, other).weight)


def test_unknown_architecture_names_those_that_are_known():
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(
        NotImplementedError, match=r"GPTNeoXForCausalLM \('gpt_neox'\).*It knows: gemma, .*qwen3.*'hqq'"
    ):
        hfkv.quantize_weights(model, hfkv.WeightConfig("awq", calibration_ids=IDS))


def test_layers_that_share_an_input_are_found_in_order():
    found = [[name.rpartition(".")[2] for name in group.linears] for group in shared_inputs(small_model())]
    assert found == 2 * [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
