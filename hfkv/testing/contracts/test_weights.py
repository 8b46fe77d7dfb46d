"""What every weight quantizer promises: the same logits after saving, in any file, folder or process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfkv
from hfkv.testing.cases import WeightCase, WeightCases
from hfkv.testing.weights import IDS, logits, small_model
from hfkv.weights import QuantizedLinear

both_ties = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def quantized_layers(model: torch.nn.Module) -> dict[str, QuantizedLinear]:
    """The quantized layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def test_declaration(hfkv_weights: WeightCase) -> None:
    """The class goes by the name of its record."""
    assert issubclass(hfkv_weights.layer_class, QuantizedLinear)
    assert hfkv_weights.layer_class.backend == hfkv_weights.spec.name


@both_dtypes
def test_round_trip_is_exact(hfkv_weights: WeightCase, dtype: torch.dtype, tmp_path: Path) -> None:
    """Loaded in quantized form, saved in shards, moved and loaded again: not a bit of the logits changes."""
    small_model(dtype).save_pretrained(tmp_path / "plain")
    config = hfkv_weights.config()
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config, dtype=dtype)
    before = logits(quantized)
    assert quantized_layers(quantized)
    assert not torch.equal(before, logits(small_model(dtype))), "nothing was quantized"
    quantized.save_pretrained(tmp_path / "saved", max_shard_size="30KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    shutil.move(tmp_path / "saved", tmp_path / "moved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "moved")
    assert quantized_layers(again).keys() == quantized_layers(quantized).keys()
    assert again.dtype == dtype
    assert torch.equal(logits(again), before)
    # what was loaded can be saved too
    again.save_pretrained(tmp_path / "twice")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "twice")), before)


@both_ties
def test_head_is_quantized_on_request(hfkv_weights: WeightCase, tied: bool, tmp_path: Path) -> None:
    """``skip=[]`` quantizes the head too; a tied one is split off, and the embeddings stay as they are."""
    plain = small_model(tied=tied)
    plain.save_pretrained(tmp_path / "plain")
    config = hfkv_weights.config(skip=[])
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config, dtype="float32")
    assert "lm_head" in quantized_layers(quantized)
    assert torch.equal(quantized.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    quantized.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert "lm_head" in quantized_layers(again)
    assert torch.equal(logits(again), logits(quantized))
    assert torch.equal(logits(hfkv.quantize_weights(small_model(tied=tied), config)), logits(quantized))


def test_in_place_is_the_same_as_loading(hfkv_weights: WeightCase, tmp_path: Path) -> None:
    """`hfkv.quantize_weights` makes what `from_pretrained` makes, and what it makes can be saved."""
    small_model().save_pretrained(tmp_path / "plain")
    config = hfkv_weights.config()
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=config, dtype="float32", device_map="cpu"
    )
    in_place = hfkv.quantize_weights(small_model(), config)
    assert torch.equal(logits(in_place), logits(loaded))
    assert in_place.config.to_dict()["quantization_config"] == loaded.config.to_dict()["quantization_config"]
    in_place.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), logits(loaded))


def test_another_process_needs_no_import(hfkv_all_weights: WeightCases, tmp_path: Path) -> None:
    """Where hfkv is installed, ``from_pretrained(folder)`` is all; where it is off, every checkpoint fails to load."""
    expected = []
    for index, case in enumerate(hfkv_all_weights.cases):
        quantized = hfkv.quantize_weights(small_model(), case.config())
        quantized.save_pretrained(tmp_path / str(index))
        expected.append(logits(quantized)[:, : len(IDS[0])])
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM; torch.set_num_threads(1)\n"
        # where a gradient may flow, weights are decoded and no product that quantizes its inputs is used
        "torch.set_grad_enabled(False)\n"
        "found = []\n"
        f"for index in range({len(expected)}):\n"
        "    try:\n"
        "        model = AutoModelForCausalLM.from_pretrained(f'{sys.argv[1]}/{index}')\n"
        f"        found.append(model(torch.tensor({IDS})).logits.detach())\n"
        "    except Exception as error:\n"
        "        found.append(str(error))\n"
        "torch.save(found, sys.argv[2])\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / "found")]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    for case, found, right in zip(hfkv_all_weights.cases, torch.load(tmp_path / "found"), expected, strict=True):
        assert isinstance(found, torch.Tensor), f"{case.label}: {found}"
        assert torch.equal(found, right), case.label
    off = {**os.environ, "HFKV_AUTOLOAD": "0"}
    subprocess.run(command, env=off, check=True, capture_output=True, timeout=600)
    for case, found in zip(hfkv_all_weights.cases, torch.load(tmp_path / "found"), strict=True):
        assert isinstance(found, str), f"{case.label} loaded where hfkv is off"
        assert "mismatch" in found, f"{case.label}: {found}"


def test_config_is_json(hfkv_weights: WeightCase) -> None:
    """A quantized model's config can be printed and written."""
    model = hfkv.quantize_weights(small_model(), hfkv_weights.config())
    written = json.loads(model.config.to_json_string())["quantization_config"]
    assert written["quant_method"] == "hfkv"
    assert hfkv.WeightConfig(**written) == model.config.quantization_config
    assert hfkv_weights.spec.name in f"{model.config}"


def test_bytes_are_those_of_the_tensors(hfkv_weights: WeightCase) -> None:
    """`hfkv.describe` counts every tensor once, and a quantized layer is smaller than a plain one in 16 bits."""
    model = hfkv.quantize_weights(small_model(), hfkv_weights.config())
    logits(model)
    report = hfkv.describe(model)
    assert report.stored_bytes == sum(t.untyped_storage().nbytes() for t in {*model.parameters(), *model.buffers()})
    assert 0 < report.bits_per_weight < 16
    assert {layer.name for layer in report.layers} == quantized_layers(model).keys()
    assert all(layer.path for layer in report.layers)


def test_decoded_weight_is_what_computes(hfkv_weights: WeightCase) -> None:
    """One token and many agree with the decoded weight, whichever way they are computed; ``.weight`` reads as it."""
    model = hfkv.quantize_weights(small_model(), hfkv_weights.config())
    for layer in quantized_layers(model).values():
        generator = torch.Generator().manual_seed(0)
        for rows in (1, 3, 200):
            states = torch.randn(rows, layer.in_features, generator=generator)
            with torch.no_grad():
                expected = torch.nn.functional.linear(states, layer.decode(torch.float32), layer.bias)
                if layer.activation_bits is None:
                    torch.testing.assert_close(layer(states), expected, rtol=1e-4, atol=1e-4)
                else:
                    # the largest of a row is about four deviations: a step is 8 / 2**bits of one
                    step = 8 / 2**layer.activation_bits
                    assert (layer(states) - expected).std() < step * expected.std()
        weight = layer.weight
        assert (weight.shape, weight.dtype) == ((layer.out_features, layer.in_features), torch.float32)
        assert torch.equal(weight + 0, layer.decode(torch.float32))


def test_gradients_reach_the_input(hfkv_weights: WeightCase) -> None:
    """Adapters can be trained: the gradient is that of the decoded weight, also after a forward in `eval`."""
    model = hfkv.quantize_weights(small_model(), hfkv_weights.config())
    logits(model.eval())
    model.train()
    for layer in quantized_layers(model).values():
        states = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(0), requires_grad=True)
        layer(states).square().sum().backward()
        weight = layer.decode(torch.float32)
        output = torch.nn.functional.linear(states.detach(), weight, layer.bias).detach()
        torch.testing.assert_close(states.grad, 2 * output @ weight, rtol=1e-3, atol=1e-3)


def test_dequantize_gives_a_plain_model(hfkv_weights: WeightCase, tmp_path: Path) -> None:
    """`model.dequantize()` leaves plain layers, without a dtype too, and the model saves as a plain one."""
    model = hfkv.quantize_weights(small_model(), hfkv_weights.config())
    before = logits(model)
    model.save_pretrained(tmp_path / "quantized")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized").dequantize()
    assert not quantized_layers(model)
    # where the inputs were quantized too, they no longer are
    assert (logits(model) - before).std() < 0.05 * before.std()
    model.save_pretrained(tmp_path / "plain")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")), logits(model))
