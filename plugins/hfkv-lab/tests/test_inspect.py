"""What an inspection sees, on tensors that were made to have it."""

from __future__ import annotations

import copy
import re

import pytest
import torch

from hfkv.testing.models import load
from hfkv_lab.advice import advise
from hfkv_lab.geometry import best, hadamard, trials
from hfkv_lab.inspect_page import page
from hfkv_lab.inspection import attention, channels, inspect, mass, matrices, residual
from hfkv_lab.output import plain
from hfkv_lab.recording import record
from hfkv_lab.report import html


@pytest.fixture(scope="module")
def found(small, tokenizer, words):
    return inspect(small, tokenizer, words, 220, 16)


@pytest.fixture
def states():
    return torch.randn(1, 2, 200, 16, generator=torch.Generator().manual_seed(0))


def test_outlier_channels_are_found_and_are_steady(states):
    assert channels(states).outliers == []
    assert channels(states).steadiness is None
    states[:, 1, :, 3] = 10
    seen = channels(states)
    assert seen.outliers == [19]
    assert seen.steadiness == 1
    assert seen.largest == pytest.approx(10 / sorted(seen.magnitude)[15], rel=0.1)
    # as large on average, in a tenth of the tokens
    states[:, 1, :, 3] = 0
    states[:, 1, ::10, 3] = 100
    seen = channels(states)
    assert seen.outliers == [19]
    assert seen.steadiness == pytest.approx(0.1)


def test_channels_are_in_the_order_of_the_heads(states):
    expected = torch.cat([states[0, head].abs().mean(0) for head in range(2)])
    torch.testing.assert_close(torch.tensor(channels(states).magnitude), expected)


def test_attention_is_counted():
    # 40 tokens: 80 % on the first, 20 % spread over the others
    weights = torch.full((1, 2, 3, 40), 0.2 / 39)
    weights[..., 0] = 0.8
    seen = attention(weights)
    assert seen.sinks == pytest.approx(0.8 + 3 * 0.2 / 39)
    # one in twenty of 40 tokens
    assert seen.few == pytest.approx(0.8 + 0.2 / 39)
    # 0.1 more takes half of the others
    assert seen.ninety == 1 + 20
    even = attention(torch.full((1, 1, 1, 40), 1 / 40))
    assert (even.sinks, even.few) == (pytest.approx(0.1), pytest.approx(0.05))


def test_attention_mass_sums_to_one(small):
    calls = record(small, torch.randint(0, 256, (1, 50), generator=torch.Generator().manual_seed(1)), 5)
    received = mass(calls)
    assert received.shape == (3, 50)
    torch.testing.assert_close(received.sum(1), torch.ones(3))


def test_residual_stream_has_its_outliers():
    stream = torch.randn(50, 64, generator=torch.Generator().manual_seed(2))
    stream[:, 7] *= 20
    stream[0, 30] = 5000
    seen = residual(4, stream)
    # the first token's is told apart from a dimension that is large everywhere
    assert seen.outliers == [7]
    assert (seen.block, seen.token, seen.dimension) == (4, 0, 30)
    assert seen.largest == pytest.approx(5000 / float(stream.abs().median()))


def test_weights_beyond_six_sigma_are_counted(small):
    spiked = copy.deepcopy(small)
    assert all(matrix.beyond == 0 and matrix.largest < 6 for matrix in matrices(small))
    with torch.no_grad():
        weight = spiked.model.layers[1].mlp.up_proj.weight
        weight[3, :4] = 100 * weight.std()
    hit = {matrix.name: matrix for matrix in matrices(spiked) if matrix.beyond}
    assert list(hit) == ["model.layers.1.mlp.up_proj"]
    assert hit["model.layers.1.mlp.up_proj"].beyond == 4
    assert hit["model.layers.1.mlp.up_proj"].weights == 64 * 96


@pytest.mark.parametrize("size", [1, 2, 64, 128])
def test_hadamard_is_orthogonal(size):
    matrix = hadamard(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), rtol=0, atol=1e-5)
    torch.testing.assert_close(matrix.abs(), torch.full((size, size), size**-0.5))


@pytest.mark.parametrize("size", [0, 3, 80])
def test_hadamard_of_other_sizes_is_none(size):
    assert hadamard(size) is None


def test_geometries_are_compared_at_the_output(small):
    ids = torch.randint(0, 256, (1, 180), generator=torch.Generator().manual_seed(3))
    louder = copy.deepcopy(small)
    with torch.no_grad():
        for layer in louder.model.layers:
            layer.self_attn.k_proj.weight[::8] *= 20
            layer.self_attn.q_proj.weight[::8] /= 20
    with torch.no_grad():
        calm, loud = (trials(record(model, ids, 16)) for model in (small, louder))
    # two parts, two axes, with and without sinks, rotated and not
    assert len(loud) == len(calm) == 16
    assert best(loud, "keys", 4).axis == "channel"
    # the two channels that turn together: scaling keys and queries against each other changes nothing about the values
    for left, right in zip(calm[8:], loud[8:], strict=True):
        assert left.part == right.part == "values"
        assert left.output == pytest.approx(right.output, rel=1e-2)


def test_advice_gives_its_numbers(found):
    advice = {item.option: item for item in advise(found)}
    assert list(advice) == ["key_axis", "value_axis", "sink_length", "rotation", "weights"]
    winner = best(found.geometry, "keys", 4)
    assert advice["key_axis"].answer.startswith(winner.axis)
    assert f"{winner.output:.3f}" in advice["key_axis"].because
    assert advice["weights"].answer == "a scale per row will do"


def test_page_holds_everything(found):
    shown = page(found, {"model": "tiny"})
    text = html(shown)
    assert text.count("<svg") == 3
    # a heat map is a picture inside the page: nothing is loaded
    assert "data:image/png;base64" in text
    assert set(re.findall(r'(?:src|href)="(#|data:|)', text)) == {"#", "data:"}
    data = plain(shown.data)
    assert len(data["inspection"]["layers"]) == 3
    assert len(data["inspection"]["residual"]) == 4
    assert {item["option"] for item in data["advice"]} >= {"key_axis", "value_axis"}


def test_layers_that_see_a_window_are_left_out(tokenizer):
    model = load("gemma3", "sdpa").model
    words = "abc " * 300
    # the tiny model knows 96 tokens
    tokenizer = type(tokenizer)(tokenizer_object=copy.deepcopy(tokenizer.backend_tokenizer))
    seen = inspect(model, tokenizer, "".join(chr(33 + ord(c) % 60) for c in words), 120, 8)
    assert [layer.layer for layer in seen.layers] == [1, 3]


def test_too_few_tokens_are_refused(small, tokenizer, words):
    with pytest.raises(ValueError, match="queries=64 must be at least 1 and less than tokens=64"):
        inspect(small, tokenizer, words, 64, 64)
