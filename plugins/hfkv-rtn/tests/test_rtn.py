"""The weight quantizer "rtn": grids, bits and the decoded weight against a plain computation."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

import hfkv
from hfkv import kernels
from hfkv.testing.weights import small_model
from hfkv.weights import products, rounding
from hfkv_rtn.linear import RtnLinear
from hfkv_rtn.options import RtnOptions

WIDTHS = (2, 3, 4, 8)


def linear(columns=256, rows=48, seed=0, scale=0.02):
    layer = nn.Linear(columns, rows, bias=False)
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(4, rows, columns, generator=generator)
    # Student's t of three degrees of freedom: weights with outliers
    layer.weight.data = scale * normal[0] / normal[1:].square().mean(0).sqrt()
    return layer


def quantized(layer, **options):
    return RtnLinear.quantized(layer, RtnOptions(**options))


def plain(weight, nbits, group, symmetric):
    """Round to nearest, one group at a time, in Python's own order."""
    result = torch.empty_like(weight)
    for row, start in itertools.product(range(len(weight)), range(0, weight.shape[1], group)):
        part = weight[row, start : start + group]
        if symmetric:
            most = 2 ** (nbits - 1) - 1
            step = (part.abs().max() / most).clamp_min(2**-24).half().float()
            result[row, start : start + group] = (part / step).round().clamp(-most, most) * step
        else:
            step = ((part.max() - part.min()) / (2**nbits - 1)).clamp_min(2**-24).half().float()
            low = part.min().half().float()
            result[row, start : start + group] = ((part - low) / step).round().clamp(0, 2**nbits - 1) * step + low
    return result


# the grids


@pytest.mark.parametrize("columns", [256, 200, 24, 13])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("nbits", WIDTHS)
def test_decoded_weight_is_that_of_a_plain_computation(nbits, symmetric, columns):
    layer = linear(columns, rows=8)
    for granularity, group in (("group", 32), ("row", columns)):
        options = {"group_size": 32} if granularity == "group" else {}
        found = quantized(layer, nbits=nbits, symmetric=symmetric, granularity=granularity, **options)
        torch.testing.assert_close(
            found.decode(torch.float32), plain(layer.weight, nbits, group, symmetric), rtol=0, atol=1e-7
        )
        assert torch.equal(found.approximate(layer.weight.detach()), found.decode(torch.float32))
    per_tensor = quantized(layer, nbits=nbits, symmetric=symmetric, granularity="tensor")
    expected = plain(layer.weight.reshape(1, -1), nbits, columns * 8, symmetric).view(8, columns)
    torch.testing.assert_close(per_tensor.decode(torch.float32), expected, rtol=0, atol=1e-7)


def test_levels_of_nf4_are_those_of_the_paper():
    # the table that is printed in QLoRA's appendix
    printed = [
        -1.0, -0.6961928, -0.52507305, -0.39491748, -0.28444138, -0.18477343, -0.09105003, 0.0,
        0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
    ]  # fmt: skip
    assert pytest.approx(printed, abs=1e-6) == rounding.LEVELS


def test_nf4_takes_the_nearest_level():
    layer = linear()
    found = quantized(layer, quant_type="nf4")
    groups = layer.weight.detach().view(48, -1, 64)
    scale = groups.abs().amax(-1, keepdim=True).half().float()
    levels = scale * torch.tensor(rounding.LEVELS)
    nearest = (groups[..., None] - levels[:, :, None]).abs().amin(-1)
    chosen = (found.decode(torch.float32).view_as(groups) - groups).abs()
    torch.testing.assert_close(chosen, nearest, rtol=0, atol=1e-7)


@pytest.mark.parametrize("options", [{"symmetric": True}, {"symmetric": False}, {"nbits": 4, "quant_type": "nf4"}])
@pytest.mark.parametrize("value", [0.0, 1e-9, -0.5, 1e6])
def test_constant_and_extreme_weights_stay_finite(value, options):
    layer = nn.Linear(64, 16, bias=False)
    layer.weight.data.fill_(value)
    found = quantized(layer, **{"nbits": 8} | options).decode(torch.float32)
    assert found.isfinite().all()
    # a scale ends where float16 does; so does an offset, and there are 127 steps of a symmetric scale
    limit = torch.inf if options == {"symmetric": True} else 65504
    expected = layer.weight.detach().clamp(-limit, limit)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2**-20)


# bits


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({"nbits": 4}, 4 + 16 / 128),
        ({"nbits": 4, "symmetric": False}, 4 + 32 / 128),
        ({"nbits": 3, "group_size": 64}, 3 + 16 / 64),
        ({"nbits": 2, "group_size": 32, "symmetric": False}, 2 + 32 / 32),
        ({"nbits": 8, "granularity": "row"}, 8 + 16 / 512),
        ({"nbits": 4, "granularity": "tensor"}, 4 + 16 / (512 * 64)),
        ({"quant_type": "nf4"}, 4 + 16 / 64),
    ],
)
def test_bits_per_weight_are_those_of_the_formula(options, bits):
    layer = quantized(linear(512, 64), **options)
    assert layer.bits_per_weight == bits
    assert hfkv.describe(nn.Sequential(layer)).bits_per_weight == bits
    reached = sum(tensor.untyped_storage().nbytes() for tensor in layer.buffers())
    assert 8 * reached == bits * 512 * 64


def test_error_falls_with_bits_and_with_smaller_groups():
    layer = linear(512, 64)

    def error(**options):
        return (quantized(layer, **options).decode(torch.float32) - layer.weight.detach()).square().mean().item()

    assert error(nbits=8) < error(nbits=4) / 50
    assert error(nbits=4) < error(nbits=3) < error(nbits=2)
    assert error(nbits=4, group_size=32) < error(nbits=4) < error(nbits=4, granularity="row")
    assert error(nbits=4, granularity="row") < error(nbits=4, granularity="tensor") / 2
    # at the same 4.25 bits
    assert error(quant_type="nf4") < error(nbits=4, group_size=64)
    assert error(nbits=4, group_size=64, symmetric=False) < error(nbits=4, group_size=64)


# the products of torch, where there are no kernels


@pytest.fixture
def no_kernels():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HFKV_KERNELS", "reference")
        kernels.forget_choices()
        yield
    kernels.forget_choices()


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    ("options", "product"),
    [
        ({"nbits": 8, "granularity": "row"}, "int8"),
        ({"nbits": 8, "granularity": "tensor"}, "int8"),
        ({"nbits": 4, "group_size": 64}, "int4"),
        # 576 inputs: the last group of 128 is shorter
        ({"nbits": 4}, "int4"),
        ({"nbits": 4, "granularity": "row"}, "int4"),
        ({"nbits": 4, "granularity": "tensor"}, "int4"),
        ({"nbits": 4, "symmetric": False}, "int4"),
        ({"nbits": 3}, "int4"),
        ({"nbits": 3, "symmetric": False, "group_size": 64}, "int4"),
        ({"nbits": 2, "granularity": "row"}, "int4"),
        ({"nbits": 2, "symmetric": False, "group_size": 32}, "int4"),
        ({"nbits": 8}, None),
        ({"quant_type": "nf4"}, None),
    ],
)
def test_few_rows_of_bfloat16_take_the_product_of_torch(options, product):
    if product == "int4" and not products.has_int4():
        pytest.skip("this torch has no 4-bit product for this CPU, or lays its tiles out in another way")
    layer = linear(576, 128, scale=1.0).bfloat16()
    bias = nn.Parameter(torch.randn(128).bfloat16())
    layer.bias = bias
    found = quantized(layer, **options)
    saved = {name: tensor.clone() for name, tensor in found.state_dict().items()}
    weight = found.decode(torch.float32)
    for rows in (1, 3, 32, 33, 200):
        states = torch.randn(rows, 576).bfloat16()
        assert found.fast(states) is ((product == "int8" and rows <= 32) or (product == "int4" and rows <= 64))
        expected = states.float() @ weight.T + bias.float()
        with torch.no_grad():
            actual = found(states[None])[0].float()
        # bfloat16 has 8 bits: of the output, and in the product of the scales
        assert (actual - expected).std() < 0.01 * expected.std()
    # what torch wants in another order is saved, copied and decoded as it was
    for copied in (found, copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert copied.state_dict().keys() == saved.keys()
        assert all(torch.equal(tensor, saved[name]) for name, tensor in copied.state_dict().items())
        assert torch.equal(copied.decode(torch.float32), weight)
    assert not found.fast(torch.randn(1, 576))
    again = quantized(layer, **options)
    again(torch.randn(1, 576).bfloat16())
    again.load_state_dict(found.state_dict())
    assert torch.equal(again.decode(torch.float32), weight)
    assert torch.equal(found.to("cpu", torch.float16).decode(torch.float32), weight)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("nbits", [2, 3])
def test_fewer_bits_take_4_in_memory_once_they_were_used_and_their_own_in_the_file(nbits):
    layer = quantized(linear(256, 128).bfloat16(), nbits=nbits, group_size=64)
    saved = layer.state_dict()["codes"].clone()
    with torch.no_grad():
        layer(torch.randn(1, 256).bfloat16())
    assert layer.codes.nbytes == 128 * 256 * (4 if products.has_int4() else nbits) // 8
    assert hfkv.describe(nn.Sequential(layer)).packed_bytes == sum(buffer.nbytes for buffer in layer.buffers())
    assert torch.equal(layer.state_dict()["codes"], saved)
    assert saved.nbytes == 128 * 256 * nbits // 8


@pytest.mark.usefixtures("no_kernels")
def test_path_says_where_a_token_is_decoded_slowly():
    assert "slowly" in quantized(linear(256, 128), quant_type="nf4").path()
    assert "slowly" not in quantized(linear(256, 128), nbits=3).to("meta").path()


@pytest.mark.usefixtures("no_kernels")
def test_4_bit_codes_lie_in_the_tiles_of_the_product_in_as_many_bytes():
    layer = quantized(linear(256, 128).bfloat16(), nbits=4)
    before = layer.codes.nbytes
    with torch.no_grad():
        layer(torch.randn(1, 256).bfloat16())
    assert layer.codes.nbytes == before
    assert layer.codes.dim() == (3 if products.has_int4() else 2)
    codes = torch.randint(0, 16, (192, 40), dtype=torch.uint8)
    assert torch.equal(products.from_tiles(products.tiles(codes)), codes)


@pytest.mark.usefixtures("no_kernels")
def test_codes_and_states_may_begin_at_any_byte():
    """torch's 8-bit product ends the process with a segmentation fault where they do."""
    for options in ({"nbits": 8, "granularity": "row"}, {"nbits": 4, "group_size": 64}):
        layer = quantized(linear(192, 128, scale=1.0).bfloat16(), **options)
        weight = layer.decode(torch.float32)
        for rows in (1, 10):
            room = torch.empty(layer.codes.nbytes + 64, dtype=torch.uint8)[1 : 1 + layer.codes.nbytes]
            layer.settle()
            moved = room.view(layer.codes.dtype).view(layer.codes.shape)
            moved.copy_(layer.codes)
            layer.codes = moved
            states = torch.randn(rows * 192 + 1).bfloat16()[1:].view(rows, 192)
            with torch.no_grad():
                actual = layer(states).float()
            assert (actual - states.float() @ weight.T).std() < 0.01 * actual.std()


# options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nbits": 5}, r"nbits=5 is not supported\. Choose from: 2, 3, 4, 8"),
        ({"nbits": 4.0}, r"nbits=4\.0 is not supported"),
        ({"quant_type": "NF4"}, r"quant_type='NF4' is not supported\. Choose from: 'int', 'nf4'\. Did you mean 'nf4'"),
        ({"quant_type": "nf4", "nbits": 3}, "quant_type='nf4' has 4 bits, got nbits=3"),
        ({"quant_type": "nf4", "symmetric": False}, "symmetric=False needs a uniform grid"),
        ({"granularity": "column"}, "granularity='column' is not supported"),
        ({"group_size": 100}, "group_size=100 must be a multiple of 8"),
        ({"granularity": "row", "group_size": 64}, "group_size=64 means nothing with granularity='row'"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        hfkv.WeightConfig("rtn", **options)


def test_description_says_what_is_what():
    config = hfkv.WeightConfig("rtn", nbits=4, group_size=64, layers={"0": {"nbits": 8}})
    text = str(hfkv.describe(hfkv.quantize_weights(small_model(), config)))
    assert "7 layers: rtn (nbits=8" in text
    assert "7 layers: rtn (nbits=4" in text
    assert "4.2" in text
