"""`hfkv convert`, in this process: what it writes, what it tells, what it refuses."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hfkv.cli.app import app


def convert(*arguments):
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def words(done):
    """The output without the frame that typer draws around a mistake."""
    return " ".join(done.output.replace("│", " ").split())


def test_everything_at_once_is_written_and_told(model_of_bytes, tmp_path):
    out = tmp_path / "out"
    options = "--drop-layers 1 --drop-by kl --kv-heads 1 --local 1:1 --window 16 --share-layers [[0,2]] --tokens 32"
    done = convert(model_of_bytes, out, *options.split(), "--context", 64, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told == json.loads((out / "conversion.json").read_text(encoding="utf-8"))
    assert told["conversion"]["share_layers"] == [[0, 2]]
    assert told["text"] == "pydoc_data.topics"
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert told["after"]["parameters"] == loaded.num_parameters() < told["before"]["parameters"]
    assert (told["before"]["layers"], told["after"]["layers"]) == (4, 3)
    # two heads of 16 channels, keys and values, in float32; then one head in a window of 16 and in a full layer
    assert told["before"]["kv_bytes"] == 4 * 64 * 2 * 2 * 16 * 4
    assert told["after"]["kv_bytes"] == (16 + 64) * 2 * 16 * 4
    assert told["after"]["kv_bytes_per_token"] == told["after"]["kv_bytes"] / 64
    assert told["quality"]["kl"] > 0
    assert (
        AutoTokenizer.from_pretrained(out)("a b").input_ids
        == AutoTokenizer.from_pretrained(model_of_bytes)("a b").input_ids
    )


def test_a_converted_folder_is_converted_again(model_of_bytes, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert convert(model_of_bytes, first, "--width", 0.5, "--tokens", 32).exit_code == 0
    done = convert(first, second, "--drop-layers", 2, "--tokens", 32)
    assert done.exit_code == 0, done.output
    assert "before healing" in done.output
    config = AutoModelForCausalLM.from_pretrained(second).config
    assert (config.num_hidden_layers, config.hidden_size, config.num_key_value_heads) == (2, 32, 1)


@pytest.mark.parametrize(
    "options",
    [
        "--width 0.5", "--drop-layers 2", "--kv-heads 1", "--local 1:1 --window 16", "--share-layers 2",
        "--latent-rank 6", "--local 1:1 --window 16 --latent-rank 6 --share-layers [[0,2]]",
    ],
)  # fmt: skip
def test_what_is_planned_is_what_is_stored(model_of_bytes, tmp_path, options):
    pytest.importorskip("hfkv_lab", reason="hfkv-lab, which plans and evaluates, is not installed")
    out = tmp_path / "out"
    done = convert(model_of_bytes, out, *options.split(), "--tokens", 32, "--context", 64, "--json")
    assert done.exit_code == 0, done.output
    stored = json.loads(done.stdout)["after"]
    asked = [str(out), "--memory", "8GB", "--context", "64", "--cache", "dynamic", "--json"]
    planned = json.loads(CliRunner().invoke(app, ["plan", *asked]).stdout)
    assert planned["parameters"]["total"] == stored["parameters"]
    # planned for 16 bits, stored in float32; a plan counts a number for each layer with a window as well
    assert 0 <= 2 * planned["caches"]["plain"]["bytes"] - stored["kv_bytes"] <= 2 * 2 * 8


def test_what_was_converted_is_evaluated(model_of_bytes, tmp_path):
    """Latents and layers that share, behind a quantized cache: its cost is measured against the converted model."""
    pytest.importorskip("hfkv_lab", reason="hfkv-lab, which plans and evaluates, is not installed")
    out = tmp_path / "out"
    assert convert(model_of_bytes, out, *"--latent-rank 16 --share-layers [[0,1]] --tokens 32".split()).exit_code == 0
    asked = "--windows 1 --prefill 64 --tokens 32 --part decoding --part layers --json".split()
    caches = [word for nbits in (8, 2) for word in ("--cache", f"kivi:nbits={nbits},group_size=8,residual_length=0")]
    done = CliRunner().invoke(app, ["eval", str(out), *caches, *asked])
    assert done.exit_code == 0, done.output
    plain, fine, coarse = json.loads(done.stdout)["caches"]
    assert plain["kl"]["high"] < 1e-9 < fine["kl"]["value"] < 0.1 * coarse["kl"]["value"]
    assert coarse["bits_per_element"] < fine["bits_per_element"] < 16
    # what stands in the cache is not what attends
    assert not coarse["layers"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "nothing is to be converted"),
        (["--latent-rank", "33"], "32 channels"),
        (["--latent-rank", "8", "--share-layers", "2", "--share-map", "similar"], "map='similar'"),
        (["--local", "5"], "L:F"),
        (["--local", "0:1"], "L:F"),
        (["--share-layers", "two"], "lists of layers"),
        (["--kv-heads", "1", "--window", "64"], "--local"),
        (["--kv-heads", "1", "--drop-by", "kl"], "--drop-layers"),
        (["--kv-heads", "1", "--share-map", "similar"], "--share-layers"),
        (["--kv-heads", "2"], r"one of [1]"),
        (["--drop-layers", "1", "--tokens", "100000"], "--tokens"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(model_of_bytes, tmp_path, options, says):
    done = convert(model_of_bytes, tmp_path / "out", *options)
    assert done.exit_code != 0
    assert says in words(done), done.output
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_not_overwritten(model_of_bytes):
    done = convert(model_of_bytes, model_of_bytes, "--kv-heads", 1)
    assert done.exit_code == 2
    assert "is there already" in words(done)
