"""The weight quantizer "bnb": the library's own numbers, and its traps."""

from __future__ import annotations

import bitsandbytes
import pytest
import torch
from bitsandbytes import functional
from torch import nn

import hfkv
from hfkv.testing.weights import IDS, logits, small_model
from hfkv_bnb.linear import BnbLinear
from hfkv_bnb.options import BnbOptions

needs_avx512 = pytest.mark.skipif(
    not functional.has_avx512bf16(), reason="bitsandbytes has no AVX-512 product for bfloat16 on this CPU"
)


def linear(columns=256, rows=128, dtype=torch.bfloat16, bias=True):
    torch.manual_seed(0)
    return nn.Linear(columns, rows, bias=bias, dtype=dtype)


def quantized(layer, **options):
    return BnbLinear.quantized(layer, BnbOptions(**options))


def in_the_library(layer, **arguments):
    """bitsandbytes' own layer of the same weight."""
    theirs = bitsandbytes.nn.Linear4bit(
        layer.in_features, layer.out_features, compute_dtype=layer.weight.dtype, **arguments
    )
    theirs.load_state_dict(layer.state_dict())
    return theirs.to("cpu")


def gradient(forward, states):
    states = states.clone().requires_grad_()
    forward(states).float().square().sum().backward()
    # bitsandbytes' product for AVX-512 passes none on, with a warning of PyTorch's
    return torch.zeros(states.shape) if states.grad is None else states.grad.float()


@pytest.mark.parametrize(("kind", "nested"), [("nf4", False), ("nf4", True), ("fp4", False)])
def test_weight_is_that_of_the_librarys_layer(kind, nested):
    layer = linear(dtype=torch.float32)
    theirs = in_the_library(layer, quant_type=kind, compress_statistics=nested)
    ours = quantized(layer, quant_type=kind, double_quant=nested)
    expected = functional.dequantize_4bit(theirs.weight.data, theirs.weight.quant_state)
    assert torch.equal(ours.decode(torch.float32), expected)


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({"nbits": 8}, 8 + 32 / 256),
        ({"nbits": 4}, 4 + 32 / 64),
        ({"nbits": 4, "block_size": 128}, 4 + 32 / 128),
        ({"nbits": 4, "double_quant": True}, 4 + 8 / 64 + 32 / (64 * 256) + 32 / (256 * 128)),
    ],
)
def test_bits_per_weight_are_those_of_the_formula(options, bits):
    assert quantized(linear(), **options).bits_per_weight == bits


def test_nbits_choose_the_type():
    assert quantized(linear(), nbits=4).options.kind == "nf4"
    assert quantized(linear(), nbits=8).options.kind == "int8"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nbits": 3}, r"nbits=3 is not supported\. Choose from: 4, 8"),
        ({"nbits": 8, "quant_type": "nf4"}, r"quant_type='nf4' does not have nbits=8: choose 'int8'"),
        ({"nbits": 8, "double_quant": True}, "double_quant=True needs nbits=4"),
        ({"nbits": 8, "threshold": -1}, "threshold=-1 must be a number of at least 0"),
        ({"quant_type": "fp8"}, "Did you mean 'fp4'"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        hfkv.WeightConfig("bnb", **options)


# traps


@needs_avx512
def test_gradients_are_wrong_after_one_forward_in_eval():
    """bitsandbytes 0.50 leaves the codes in the order of its AVX-512 product; ours are put back.

    No gradient passes that product, so that all but the residual stream's is lost.
    """
    layer, states = linear(bias=False), torch.randn(7, 256).bfloat16()
    theirs, ours = in_the_library(layer, quant_type="nf4", bias=False), quantized(layer, nbits=4)
    for forward in (theirs.eval(), ours.eval()):
        with torch.no_grad():
            forward(states)
    weight = ours.decode(torch.float32)
    expected = 2 * states.float() @ weight.T @ weight

    def error(found):
        return ((found - expected).norm() / expected.norm()).item()

    assert ours.codes.shape == (128, 128)
    assert error(gradient(ours.train(), states)) < 0.02
    # the report, and the proof that this test can fail
    assert error(gradient(theirs.train(), states)) > 0.5


@needs_avx512
def test_codes_that_were_repacked_are_saved_as_they_were():
    layer = quantized(linear(), nbits=4, double_quant=True)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with torch.no_grad():
        first = layer(torch.ones(1, 256).bfloat16())
    assert layer.codes.shape == (128, 128)
    after = layer.state_dict()
    # bitsandbytes quantizes its doubly quantized scales anew at this point
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    layer.load_state_dict(before)
    with torch.no_grad():
        assert torch.equal(layer(torch.ones(1, 256).bfloat16()), first)


def test_dequantize_needs_no_dtype():
    model = hfkv.quantize_weights(small_model(torch.bfloat16), hfkv.WeightConfig("bnb"))
    before = logits(model)
    model.config.dtype = "bfloat16"
    plain = model.dequantize()
    assert plain.dtype == torch.bfloat16
    assert (logits(plain) - before).float().std() < 0.02 * before.float().std()


def test_outlier_features_spoil_int8_unless_they_are_split_off():
    layer = linear(512, 128, torch.float32)
    states = torch.randn(64, 512)
    # one feature at 1,000 times the median
    states[:, 7] = 1000 * states.abs().median()
    with torch.no_grad():
        weight = quantized(layer, nbits=8).decode(torch.float32)
        # what 16 bits compute with the same weights, whose own rounding an outlier enlarges too
        expected = torch.nn.functional.linear(states.half().float(), weight, layer.bias)
        split, whole = (quantized(layer, nbits=8, threshold=threshold)(states) for threshold in (6.0, 0.0))
    # what the outlier does not reach: the part of the output that the other features make
    others = expected - states[:, 7:8] * weight[:, 7]
    split_error, whole_error = ((found - expected).std() / others.std() for found in (split, whole))
    assert split_error < 0.02
    assert whole_error > 0.5


def test_generate_takes_bnb_weights_and_a_quantized_cache():
    model = hfkv.quantize_weights(small_model(torch.bfloat16), hfkv.WeightConfig("bnb"))
    output = model.generate(
        torch.tensor(IDS), max_new_tokens=4, cache_implementation="kivi", return_dict_in_generate=True
    )
    assert output.sequences.shape[1] == len(IDS[0]) + 4
