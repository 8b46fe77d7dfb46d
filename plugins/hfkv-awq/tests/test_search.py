"""The search against plain computations with the inputs themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hfkv_awq.calibration import Moments
from hfkv_awq.linear import AwqLinear
from hfkv_awq.options import AwqOptions
from hfkv_awq.search import best_scale, best_share, clipped, output_error

INPUTS, OUTPUTS, GROUP = 96, 40, 32


def case(seed=0, loud=()):
    """A weight, and inputs of which some features are fifty times as large."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator)
    states = torch.randn(500, INPUTS, generator=generator)
    states[:, list(loud)] *= 50
    moments = Moments(INPUTS, torch.device("cpu"))
    # in pieces, as they come
    for piece in states.split(170):
        moments.add(piece[None])
    return weight, states, moments


def rounds(**options):
    size = (INPUTS, OUTPUTS)
    return AwqLinear(*size, AwqOptions(**options), dtype=torch.float32, device="meta").approximate


def error(weight, reached, states):
    return ((reached - weight) @ states.T).square().sum().item()


def test_moments_give_the_error_of_the_output():
    weight, states, moments = case()
    difference = 0.1 * torch.randn_like(weight)
    expected = (difference @ states.T).square().sum(-1)
    torch.testing.assert_close(output_error(difference, moments.gram), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(moments.magnitude, states.abs().sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("nbits", [3, 4])
def test_scale_saves_the_features_that_are_large(nbits, symmetric):
    weight, states, moments = case(loud=(3, 50))
    rounded = rounds(nbits=nbits, group_size=GROUP, symmetric=symmetric)
    scale = best_scale([weight], [rounded], moments, lambda values: values)
    plain = error(weight, rounded(weight), states)
    assert error(weight, rounded(weight * scale) / scale, states) < plain / 4
    assert scale[[3, 50]].min() > 2 * scale[:3].max()


def test_scale_of_layers_that_share_an_input_is_the_best_for_their_sum():
    weight, states, moments = case(loud=(7,))
    other = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(9))
    rounded = rounds(nbits=3, group_size=GROUP)
    scale = best_scale([weight, other], [rounded, rounded], moments, lambda values: values)

    def total(factor):
        return sum(error(matrix, rounded(matrix * factor) / factor, states) for matrix in (weight, other))

    magnitude = states.abs().mean(0)
    tried = [magnitude ** (index / 20) for index in range(20)]
    assert total(scale) == pytest.approx(min(total(factor / (factor.max() * factor.min()).sqrt()) for factor in tried))


def test_even_inputs_ask_for_no_scale():
    weight, _, moments = case()
    moments.magnitude.fill_(500.0)
    scale = best_scale([weight], [rounds(nbits=4, group_size=GROUP)], moments, lambda values: values)
    assert torch.equal(scale, torch.ones(INPUTS))


@pytest.mark.parametrize("group", [GROUP, 40, INPUTS])
def test_range_is_the_best_of_each_group(group):
    weight, states, moments = case()
    # one weight that widens its group's range, where the input is small
    weight[5, 10], states[:, 10] = 9.0, 0.01 * states[:, 10]
    moments = Moments(INPUTS, torch.device("cpu"))
    moments.add(states)
    rounded = rounds(nbits=3, group_size=group, symmetric=True)
    share = best_share(weight, rounded, moments.gram, group)
    assert share.shape == (OUTPUTS, -(-INPUTS // group))
    assert share[5, 10 // group] == 0.5
    for start in range(0, INPUTS, group):
        inputs = slice(start, start + group)
        tried = []
        for value in (1 - step / 20 for step in range(11)):
            reached = rounded(clipped(weight, torch.full_like(share, value), group))
            tried.append(((reached - weight)[:, inputs] @ states[:, inputs].T).square().sum(-1))
        reached = rounded(clipped(weight, share, group))
        found = ((reached - weight)[:, inputs] @ states[:, inputs].T).square().sum(-1)
        torch.testing.assert_close(found, torch.stack(tried).amin(0), rtol=1e-3, atol=1e-3)


def test_layer_of_outlier_features_keeps_them_in_16_bits():
    layer = nn.Linear(256, 64, bias=True)
    found = AwqLinear.quantized(layer, AwqOptions(nbits=4, group_size=64, outlier_features=3))
    index = found.outlier_index.long()
    # without a text: the features that meet the largest weights
    assert set(index.tolist()) == set(layer.weight.square().sum(0).topk(3).indices.tolist())
    decoded = found.decode(torch.float32)
    assert torch.equal(decoded[:, index], layer.weight[:, index].half().float())
    assert found.bits_per_weight == 4 + 32 / 64 + 3 * 16 / 256 + 3 * 32 / (256 * 64)
    # the others are rounded as if those were zero
    rest = AwqLinear.quantized(layer, AwqOptions(nbits=4, group_size=64))
    rest.store(layer.weight.index_fill(1, index, 0))
    others = [column for column in range(256) if column not in index]
    assert torch.equal(decoded[:, others], rest.decode(torch.float32)[:, others])


@pytest.mark.parametrize("symmetric", [True, False])
def test_product_with_outlier_features_is_that_of_the_decoded_weight(symmetric):
    layer = nn.Linear(256, 64, dtype=torch.bfloat16)
    found = AwqLinear.quantized(layer, AwqOptions(group_size=64, outlier_features=2, symmetric=symmetric))
    states = torch.randn(3, 256).bfloat16()
    # in bfloat16 codes times such an input would drown what is beside it
    states[:, found.outlier_index.long()] *= 1000
    expected = states.float() @ found.decode(torch.float32).T + layer.bias.float()
    with torch.no_grad():
        assert (found(states).float() - expected).std() < 0.01 * expected.std()
    assert "2 features in 16 bits" in found.path()
