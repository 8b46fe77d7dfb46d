"""The weight quantizer "hqq": the library's solver, in hfkv's storage."""

from __future__ import annotations

import pytest
import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from torch import nn

import hfkv
from hfkv import kernels
from hfkv.weights import products
from hfkv_hqq.weights import HqqLinear, HqqOptions


def linear(columns=256, rows=64):
    layer = nn.Linear(columns, rows, bias=False)
    normal = torch.randn(4, rows, columns, generator=torch.Generator().manual_seed(0))
    # Student's t of three degrees of freedom: weights with outliers
    layer.weight.data = 0.02 * normal[0] / normal[1:].square().mean(0).sqrt()
    return layer


def error(layer, weight):
    return (weight.float() - layer.weight.detach()).abs().mean().item()


@pytest.mark.parametrize("nbits", [1, 2, 3, 4, 8])
def test_error_is_that_of_the_librarys_own_layer(nbits):
    layer = linear()
    config = BaseQuantizeConfig(nbits=nbits, group_size=64, axis=1)
    theirs = HQQLinear(layer, config, compute_dtype=torch.float32, device="cpu", del_orig=False).dequantize()
    ours = HqqLinear.quantized(layer, HqqOptions(nbits=nbits)).decode(torch.float32)
    # our codes are chosen with the scale and offset as they are stored
    assert error(layer, ours) < 1.02 * error(layer, theirs)


@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_solver_beats_the_range_alone(nbits):
    layer = linear()
    range_alone = hfkv.WeightConfig("rtn", nbits=nbits, symmetric=False, group_size=64)
    rtn_class, options = range_alone.choose(None)
    solved = HqqLinear.quantized(layer, HqqOptions(nbits=nbits)).decode(torch.float32)
    assert error(layer, solved) < 0.98 * error(layer, rtn_class.quantized(layer, options).decode(torch.float32))


@pytest.mark.parametrize("nbits", [1, 2, 3, 4, 8])
def test_bits_per_weight_are_those_of_the_formula(nbits):
    assert HqqLinear.quantized(linear(), HqqOptions(nbits=nbits)).bits_per_weight == nbits + 32 / 64


def test_4_bits_take_the_product_of_torch(monkeypatch):
    monkeypatch.setenv("HFKV_KERNELS", "reference")
    kernels.forget_choices()
    layer = HqqLinear.quantized(linear(576, 128).bfloat16(), HqqOptions(nbits=4))
    states = torch.randn(3, 576).bfloat16()
    assert layer.fast(states) is products.has_int4()
    expected = states.float() @ layer.decode(torch.float32).T
    with torch.no_grad():
        assert (layer(states).float() - expected).std() < 0.01 * expected.std()
    monkeypatch.undo()
    kernels.forget_choices()


@pytest.mark.parametrize(("options", "message"), [({"nbits": 5}, "nbits=5"), ({"group_size": 20}, "multiple of 8")])
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        hfkv.WeightConfig("hqq", **options)
