"""The weight quantizer "quanto": what the library's own layer would hold, without its extension."""

from __future__ import annotations

import pytest
import torch
from optimum.quanto import QLinear, qfloat8, qint2, qint4, qint8
from optimum.quanto.library.extensions.extension import Extension
from torch import nn

import hfkv
from hfkv.testing.weights import logits, small_model
from hfkv_quanto.weights import QuantoLinear, QuantoOptions

SETTINGS = {
    "int8": {"nbits": 8},
    "float8": {"nbits": 8, "quant_type": "float8"},
    "int4": {"nbits": 4},
    "int2": {"nbits": 2},
}
QTYPES = {"int8": qint8, "float8": qfloat8, "int4": qint4, "int2": qint2}


def pair(name, columns=256):
    torch.manual_seed(0)
    linear = nn.Linear(columns, 64, bias=False)
    theirs = QLinear.from_module(linear, weights=QTYPES[name])
    theirs.freeze()
    return linear, QuantoLinear.quantized(linear, QuantoOptions(**SETTINGS[name])), theirs.weight


@pytest.fixture
def no_compiler(monkeypatch):
    def refuse(self):
        raise RuntimeError(f"{self.name} would be compiled")

    monkeypatch.setattr(Extension, "lib", property(refuse))


@pytest.mark.parametrize("name", ["int8", "float8"])
def test_8_bits_are_the_librarys(name):
    linear, ours, theirs = pair(name)
    # our scale is a float16; a code can differ where that moves a number across the middle of two
    same = ours.codes.float() == theirs._data.float()
    assert same.float().mean() > 0.97
    torch.testing.assert_close(ours.scale.float(), theirs._scale.float(), rtol=1e-3, atol=0)
    ours_error = (ours.decode(torch.float32) - linear.weight).square().mean()
    assert ours_error < 1.02 * (theirs.dequantize() - linear.weight).square().mean()


@pytest.mark.parametrize("name", ["int4", "int2"])
def test_fewer_bits_are_the_librarys_with_nothing_compiled(name, no_compiler):
    linear, ours, theirs = pair(name)
    # without what is compiled the library cannot unpack on a CPU: its affine formula, by hand
    groups = linear.weight.detach().view(64, -1, 128)
    scale, shift = theirs._scale.view(64, -1, 1), theirs._shift.view(64, -1, 1)
    codes = ((groups + shift) / scale).round().clamp(0, 2 ** SETTINGS[name]["nbits"] - 1)
    restored = (codes * scale - shift).flatten(1)
    torch.testing.assert_close(ours.scale.float(), theirs._scale.view(64, -1), rtol=1e-3, atol=0)
    error, theirs_error = (
        (weight - linear.weight).square().mean() for weight in (ours.decode(torch.float32), restored)
    )
    assert error < 1.02 * theirs_error
    assert (ours.decode(torch.float32) - restored).abs().max() < 1.01 * scale.max()


def test_no_compiler_is_needed_for_a_model(no_compiler):
    for options in SETTINGS.values():
        model = hfkv.quantize_weights(small_model(), hfkv.WeightConfig("quanto", **options))
        assert logits(model).isfinite().all()


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({"nbits": 8}, 8 + 16 / 256),
        ({"nbits": 8, "quant_type": "float8"}, 8 + 16 / 256),
        ({"nbits": 4}, 4 + 32 / 128),
        ({"nbits": 2, "group_size": 32}, 2 + 32 / 32),
    ],
)
def test_bits_per_weight_are_those_of_the_formula(options, bits):
    assert QuantoLinear.quantized(nn.Linear(256, 64), QuantoOptions(**options)).bits_per_weight == bits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nbits": 3}, r"nbits=3 is not supported\. Choose from: 2, 4, 8"),
        ({"nbits": 4, "quant_type": "float8"}, "quant_type='float8' has 8 bits, got nbits=4"),
        ({"nbits": 8, "group_size": 64}, "group_size=64 means nothing with nbits=8"),
        ({"quant_type": "float"}, "Did you mean 'float8'"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        hfkv.WeightConfig("quanto", **options)
