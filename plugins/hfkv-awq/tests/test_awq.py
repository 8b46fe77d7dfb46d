"""The weight quantizer "awq" through its door: texts, what is saved, and what it brings on a real model."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import hfkv
from hfkv.cli.models import load_model
from hfkv.cli.prompts import long_text
from hfkv.testing.weights import IDS, logits, small_model
from hfkv_awq import calibration
from hfkv_awq.options import AwqOptions

TEXT = "a tale of two texts, told twice"


@pytest.fixture
def tokenizer():
    """A letter is a token."""
    vocabulary = {letter: index for index, letter in enumerate("?abcdefghijklmnopqrstuvwxyz ,<")}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?", bos_token="<")


def quantized(model, **options):
    return hfkv.quantize_weights(copy.deepcopy(model), hfkv.WeightConfig("awq", group_size=32, **options))


# the text


def test_text_file_and_ids_are_the_same_text(tokenizer, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    model = small_model()
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    found = [
        logits(quantized(model, **options))
        for options in (
            {"calibration_text": TEXT, "tokenizer": tokenizer},
            {"calibration_file": tmp_path / "text.txt", "tokenizer": tokenizer},
            {"calibration_ids": [ids]},
            {"calibration_ids": torch.tensor([ids])},
        )
    ]
    assert all(torch.equal(found[0], other) for other in found)
    assert not torch.equal(found[0], logits(quantized(model, calibration_ids=IDS)))


def test_tokenizer_is_found_where_the_model_is(tokenizer, tmp_path):
    small_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = hfkv.WeightConfig("awq", group_size=32, calibration_text=TEXT)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype="float32")
    expected = quantized(small_model(), calibration_text=TEXT, tokenizer=tokenizer)
    assert torch.equal(logits(loaded), logits(expected))


def test_default_text_is_read_evenly_and_begins_as_the_tokenizer_begins(tokenizer):
    pieces = calibration.texts(small_model(), AwqOptions(tokenizer=tokenizer, calibration_tokens=2048))
    assert [tuple(piece.shape) for piece in pieces] == [(1, 512)] * 4
    ids = tokenizer(long_text(), add_special_tokens=False).input_ids
    assert pieces[0][0].tolist() == ids[:512]
    assert pieces[-1][0].tolist() == ids[-512:]
    (short,) = calibration.texts(small_model(), AwqOptions(tokenizer=tokenizer, calibration_tokens=100))
    assert short.shape == (1, 100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"finds no tokenizer at '': .*Fix: pass tokenizer=\.\.\., or calibration_ids"),
        ({"tokenizer": "no-such-folder/at/all"}, "finds no tokenizer at 'no-such-folder/at/all'"),
        ({"calibration_text": "a", "calibration_ids": IDS}, "calibration_text and calibration_ids are two"),
        ({"calibration_ids": []}, "calibration_ids must be a list of lists"),
        ({"calibration_ids": [[]]}, "none of them empty"),
        ({"calibration_ids": [0.5, 0.25]}, "calibration_ids must be a list of lists"),
        ({"calibration_tokens": 0}, "calibration_tokens=0 must be an integer of at least 1"),
        ({"outlier_features": -1}, "outlier_features=-1 must be"),
        ({"clip": "yes"}, "clip='yes' is not supported"),
        ({"fold": None}, "fold=None is not supported"),
        ({"layers": {"0": {"calibration_text": "a"}}}, r"layers\['0'\] has 'calibration_text', which is of the whole"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        quantized(small_model(), **options)


def test_file_and_empty_text_are_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"calibration_file='.*none\.txt' is no file"):
        quantized(small_model(), calibration_file=tmp_path / "none.txt", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="the calibration text is empty"):
        quantized(small_model(), calibration_text="", tokenizer=tokenizer)


def test_text_is_not_saved_and_not_needed_again(tokenizer, tmp_path):
    model = quantized(small_model(), calibration_text=TEXT, tokenizer=tokenizer)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert TEXT not in json.dumps(saved)
    assert not [name for name in saved if name.startswith(("calibration", "tokenizer"))]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_text_is_read_in_as_many_goes_as_the_budget_asks_for(monkeypatch):
    expected = logits(quantized(small_model(), calibration_ids=IDS))
    monkeypatch.setattr(calibration, "BUDGET", 4 * 192**2)
    # scales are folded between the goes, which changes the last bits
    torch.testing.assert_close(logits(quantized(small_model(), calibration_ids=IDS)), expected, rtol=1e-2, atol=1e-2)


# what it brings


@pytest.fixture(scope="module")
def real():
    """The first eight layers of SmolLM2, and a text that is not the one of the calibration."""
    model, tokenizer = load_model("smollm2")
    model.model.layers = model.model.layers[:8]
    model.config.num_hidden_layers = 8
    text = long_text()
    ids = tokenizer(text[:9_000], return_tensors="pt", add_special_tokens=False).input_ids[:, -384:]
    return model, ids, {"calibration_text": text[-40_000:], "tokenizer": tokenizer, "calibration_tokens": 1024}


def divergence(plain, model, ids):
    with torch.no_grad():
        expected, actual = (each(ids, use_cache=False).logits[0].log_softmax(-1) for each in (plain, model))
    return (expected.exp() * (expected - actual)).sum(-1).mean().item()


@pytest.mark.parametrize("nbits", [3, 4])
def test_beats_plain_rounding_on_the_same_grid(real, nbits):
    model, ids, text = real
    grid = {"nbits": nbits, "group_size": 128, "symmetric": False}
    plain = hfkv.quantize_weights(copy.deepcopy(model), hfkv.WeightConfig("rtn", **grid))
    aware = hfkv.quantize_weights(copy.deepcopy(model), hfkv.WeightConfig("awq", **grid, **text))
    assert hfkv.describe(aware).bits_per_weight == hfkv.describe(plain).bits_per_weight
    assert divergence(model, aware, ids) < 0.8 * divergence(model, plain, ids)
