"""The studies on a tiny model: each varies what it says, and its table, its words and its files agree."""

from __future__ import annotations

import importlib
import json
from functools import partial

import pytest
import torch
from transformers import DynamicCache

import hfkv
from hfkv import registry
from hfkv.cache import PackedFormat
from hfkv.testing.models import load
from hfkv_lab import rotary, studies
from hfkv_lab.ablation import AblationOptions, ablate, attention_shape, filled, stored_bits
from hfkv_lab.candidates import Candidate
from hfkv_lab.studies.record import Subject

# the first column that is no setting, where that is not KL
MEASURED = {"granularity": "tensor"}
SMALL = AblationOptions(windows=1, prefill=200, tokens=24, chunk=8)


@pytest.fixture
def subject(small, tokenizer, words):
    return Subject("tiny", small, tokenizer, words, SMALL)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 96, (1, 150), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", studies.STUDIES)
def test_study_is_whole(subject, name, tmp_path):
    study = studies.run(name, subject)
    assert len(study.rows) >= 6
    assert all(set(study.columns) <= set(row) for row in study.rows)
    assert all(row["kl_low"] <= row["kl"] <= row["kl_high"] for row in study.rows if "kl" in row)
    assert study.findings
    # every row is another setting
    columns = list(study.columns)
    settings = [tuple(row[key] for key in columns[: columns.index(MEASURED.get(name, "kl"))]) for row in study.rows]
    assert len(set(settings)) == len(settings)
    numbers, plot = study.save(tmp_path, f"{name}-tiny", "hfkv eval tiny")
    saved = json.loads(numbers.read_text(encoding="utf-8"))
    first = MEASURED.get(name, "kl")
    assert saved["rows"][0][first] == pytest.approx(study.rows[0][first], rel=1e-3)
    assert saved["figure"]["file"] == plot.name
    picture = plot.read_text(encoding="utf-8")
    # a file of its own knows no variables of a page
    assert picture.startswith("<svg")
    assert "var(" not in picture
    assert picture.rstrip().endswith("</svg>")


def test_study_that_is_not_there_is_refused(subject):
    with pytest.raises(ValueError, match=r"'axis' is not there. Choose from: axes, residual"):
        studies.run("axis", subject)


def test_more_bits_cost_less(subject):
    rows = studies.run("axes", subject).rows
    for key_axis in ("channel", "token"):
        line = [row for row in rows if (row["key_axis"], row["value_axis"]) == (key_axis, "token")]
        assert [row["nbits"] for row in line] == [2, 3, 4]
        assert line[0]["kl"] > line[1]["kl"] > line[2]["kl"]
        assert line[0]["output"] > line[1]["output"] > line[2]["output"]


def test_findings_of_the_axes_are_those_of_the_numbers():
    axes = importlib.import_module("hfkv_lab.studies.axes")
    rows = [
        {
            "nbits": nbits,
            "key_axis": key,
            "value_axis": value,
            "kl": 1.0,
            "output": 1.0,
            "values": 1.0,
            "from_values": 1.0,
        }
        for nbits in (2, 3, 4)
        for key in ("channel", "token")
        for value in ("channel", "token")
    ]
    axes.of(rows, 2, "token", "channel")["kl"] = 0.5
    axes.of(rows, 2, "channel", "channel")["output"] = 0.5
    axes.of(rows, 3, "channel", "channel").update(values=0.5, from_values=4.0)
    found = axes.findings(rows)
    assert found[0] == "2 bits: keys per token and values per channel are best by KL, but not at the attention output."
    assert (
        "Values at 3 bits: grouped per channel the error of reconstruction is 0.50 times, that of the output 4.00"
        in found[4]
    )


def test_weights_are_compared_with_what_was_decoded(subject, small):
    rows = {row["matrix"]: row for row in studies.run("granularity", subject).rows}
    assert list(rows) == [name for name, module in small.named_modules() if isinstance(module, torch.nn.Linear)]
    weight = small.model.layers[1].mlp.down_proj.weight.detach()
    row = rows["model.layers.1.mlp.down_proj"]
    # symmetric, 4 bits: the largest of a row is 7 steps away from zero; the scale is stored in float16
    for name, largest in (("row", weight.abs().amax(1, keepdim=True)), ("tensor", weight.abs().amax())):
        scale = (largest / 7).half().float()
        rounded = (weight / scale).round().clamp(-8, 7) * scale
        assert row[name] == pytest.approx(float((rounded - weight).norm() / weight.norm()), rel=0.02)
    assert row["tensor"] > row["row"] > row["nf4"]


def test_keys_with_an_outlier_channel_ask_for_groups_per_channel(small, tokenizer, words):
    # two channels of every key twenty times as large: grouped per token they widen all ranges
    louder = type(small)(small.config).eval()
    louder.load_state_dict(small.state_dict())
    with torch.no_grad():
        for layer in louder.model.layers:
            layer.self_attn.k_proj.weight[::8] *= 20
            layer.self_attn.q_proj.weight[::8] /= 20
    rows = studies.run("axes", Subject("loud", louder, tokenizer, words, SMALL)).rows
    axes = importlib.import_module("hfkv_lab.studies.axes")
    for nbits in (2, 3, 4):
        channel, token = (axes.of(rows, nbits, axis, "token") for axis in ("channel", "token"))
        assert channel["from_keys"] < token["from_keys"] / 1.5


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_filled_cache_is_one_that_has_read(family, ids):
    model = load(family, "sdpa").model
    make = partial(hfkv.make_cache, "kivi", model, group_size=8, residual_length=8)
    plain = Candidate("plain", model, partial(DynamicCache, config=model.config)).read(ids)
    expected, actual = Candidate("kivi", model, make).read(ids), filled(make(), plain)
    assert actual.get_seq_length() == expected.get_seq_length() == 150
    for left, right in zip(actual.layers, expected.layers, strict=True):
        torch.testing.assert_close(left.keys, right.keys, rtol=0, atol=0)
        torch.testing.assert_close(left.values, right.values, rtol=0, atol=0)
    # and the plain cache's own tensors are not shared
    actual.layers[0].update(torch.zeros(1, *attention_states(plain)), torch.zeros(1, *attention_states(plain)))
    assert plain.get_seq_length() == 150


def attention_states(cache):
    keys = cache.layers[0].keys
    return keys.shape[1], 1, keys.shape[3]


def test_stored_bits_are_the_formula(small):
    assert attention_shape(small.config) == (2, 16)
    blocks = (4096 - 4 - 128) // 32
    # values have groups of the 16 channels that a head has
    packed = blocks * 32 * 16 * (2 * 2 + 32 / 32 + 32 / 16)
    exact = 2 * (4 + 128 + 32) * 16 * 16
    assert stored_bits(small.config, {"nbits": 2}) == pytest.approx((packed + exact) / (2 * 4096 * 16))


def test_ablation_of_plain_is_no_difference(small, tokenizer, words):
    variants = {"plain": partial(DynamicCache, config=small.config)}
    found = ablate(small, tokenizer, words, variants, SMALL)["plain"]
    assert found.kl.high < 1e-9
    assert found.top1.value == 1
    assert found.mean("output") == 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_keys_turn_back_to_what_the_projection_made(family, ids):
    model = load(family, "sdpa").model
    projected = {}

    def note(module, args, output):
        projected[id(module)] = output

    hooks = [layer.self_attn.k_proj.register_forward_hook(note) for layer in model.model.layers]
    turned = rotary.rotations(model, ids)
    cache = Candidate("plain", model, partial(DynamicCache, config=model.config)).read(ids)
    for hook in hooks:
        hook.remove()
    assert sorted(turned) == ([0, 1, 2] if family == "llama" else [1, 3])
    for index, rotation in turned.items():
        layer = model.model.layers[index].self_attn
        keys = cache.layers[index].keys
        plain = projected[id(layer.k_proj)].unflatten(-1, (-1, keys.shape[-1]))
        plain = (layer.k_norm(plain) if hasattr(layer, "k_norm") else plain).transpose(1, 2)
        torch.testing.assert_close(rotation.turn(keys, 0, back=True), plain, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rotation.turn(plain[:, :, 40:], 40), keys[:, :, 40:], rtol=1e-4, atol=1e-4)


def test_keys_quantized_after_the_embedding_are_those_of_kivi(ids):
    model = load("llama", "sdpa").model
    quantizer = registry.find(hfkv.KVQuantizerSpec, "rtn", "backend")()
    format = PackedFormat(4, "channel", 8, 16)
    options = {"nbits": 4, "group_size": 8, "residual_length": 16, "sink_length": 0}
    make = {
        "ours": partial(rotary.make_cache, model, quantizer, format, 16),
        "kivi": partial(hfkv.make_cache, "kivi", model, **options),
    }
    caches = {}
    for name, build in make.items():
        candidate = Candidate(name, model, build)
        caches[name] = candidate.read(ids[:, :100])
        # one layer is enough: the next ones see the error of values too, which only kivi has
        keys = caches[name].layers[0].keys
        states = torch.randn(1, *keys.shape[1:2], 13, keys.shape[3], generator=torch.Generator().manual_seed(1))
        caches[name].layers[0].update(states, states.clone())
    torch.testing.assert_close(caches["ours"].layers[0].keys, caches["kivi"].layers[0].keys, rtol=0, atol=0)


def test_current_tokens_are_exact_in_the_forward_that_brings_them(ids):
    model = load("llama", "sdpa").model
    quantizer = registry.find(hfkv.KVQuantizerSpec, "rtn", "backend")()
    cache = rotary.make_cache(model, quantizer, PackedFormat(2, "channel", 8, 16), 0, rotary.rotations(model, ids))
    states = torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(2))
    keys, _ = cache.layers[0].update(states, states)
    assert torch.equal(keys, states)
    assert not torch.equal(cache.layers[0].keys, states)
    assert torch.equal(cache.layers[0].values, states)


def test_model_without_rotary_embedding_is_refused():
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32)
    with pytest.raises(NotImplementedError, match="OPTForCausalLM does not turn whole heads by a rotary embedding"):
        rotary.rotations(OPTForCausalLM(config).eval(), torch.ones(1, 9, dtype=torch.long))
