"""`hfkv.set_default`: kept by a model, loadable everywhere, overruled by whatever a caller names."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache

import hfkv
from hfkv.cache import KVLayer
from hfkv.integration import cache_argument

SMALL = {"nbits": 8, "group_size": 8, "residual_length": 8, "sink_length": 2}


def cache_from(model, **arguments):
    output = model.generate(
        torch.arange(1, 41)[None], max_new_tokens=2, do_sample=False, return_dict_in_generate=True, **arguments
    )
    return output.get("cache", output.get("past_key_values"))


def widths(cache):
    return [layer.options.nbits if isinstance(layer, KVLayer) else None for layer in cache.layers]


def test_set_and_removed(tiny):
    model = tiny("llama").model
    hfkv.set_default(model, "kivi", nbits=2, layers={0: {"nbits": 8}})
    assert model.generation_config.hfkv == {"cache": "kivi", "nbits": 2, "layers": {0: {"nbits": 8}}}
    assert widths(cache_from(model)) == [8, 2, 2]
    hfkv.set_default(model, "kivi", nbits=3)
    assert widths(cache_from(model)) == [3, 3, 3]
    hfkv.set_default(model, None)
    hfkv.set_default(model, None)
    assert not hasattr(model.generation_config, "hfkv")
    assert type(cache_from(model)) is DynamicCache


def test_overruled_by_a_cache_that_is_passed_and_by_use_cache(tiny):
    model = tiny("llama").model
    hfkv.set_default(model, "kivi")
    given = DynamicCache(config=model.config)
    assert cache_from(model, **{cache_argument(model): given}) is given
    assert cache_from(model, use_cache=False) is None
    assert type(cache_from(model, cache_implementation="dynamic")) is DynamicCache


def test_a_passed_config_that_carries_a_default_of_its_own(tiny):
    model = tiny("llama").model
    hfkv.set_default(model, "kivi", nbits=2)
    assert widths(cache_from(model, generation_config=GenerationConfig(hfkv={"cache": "kivi", "nbits": 8}))) == [
        8,
        8,
        8,
    ]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kivy", {}, r"'kivy' is not known.*Did you mean 'kivi'\?"),
        ("static", {}, "'static' is not known"),
        ("kivi", {"nbit": 4}, r"option 'nbit' is not known.*Did you mean 'nbits'\?"),
        ("kivi", {"nbits": 5}, "nbits=5 is not supported"),
        ("kivi", {"layers": {"7": "dynamic"}}, "is outside this model's layers"),
    ],
)
def test_mistakes_are_told_at_once_and_change_nothing(tiny, name, options, message):
    model = tiny("llama").model
    hfkv.set_default(model, "kivi", nbits=2)
    with pytest.raises(ValueError, match=message):
        hfkv.set_default(model, name, **options)
    assert model.generation_config.hfkv == {"cache": "kivi", "nbits": 2}


def test_a_model_without_generate(tiny):
    with pytest.raises(TypeError, match="LlamaModel has no generate"):
        hfkv.set_default(tiny("llama").model.model, "kivi")


@pytest.mark.parametrize("stored", ["kivi", {"nbits": 4}, ["kivi"]])
def test_a_default_that_was_edited_by_hand(tiny, stored):
    model = tiny("llama").model
    model.generation_config.hfkv = stored
    with pytest.raises(ValueError, match=r"generation_config\.hfkv=.* names no cache and no assistant\. Fix: "):
        cache_from(model)


def test_a_default_whose_plugin_is_not_installed(tiny):
    model = tiny("llama").model
    model.generation_config.hfkv = {"cache": "ema"}
    with pytest.raises(ValueError, match=r"generation_config\.hfkv='ema' is not known\. Choose from: .*kivi"):
        cache_from(model)
    # and the caller can do without
    assert type(cache_from(model, cache_implementation="dynamic")) is DynamicCache


def load_where_hfkv_is_off(folder):
    """What a process that knows nothing of hfkv makes of the model, and leaves in a copy of it."""
    code = """
import json, sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
output = model.generate(torch.arange(1, 41)[None], max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
model.save_pretrained(sys.argv[1] + "-again")
cache = output.get("cache", output.get("past_key_values"))
print(json.dumps([type(cache).__name__, "hfkv.integration" in sys.modules]))
"""
    names = {name: value for name, value in os.environ.items() if not name.startswith("HFKV_")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**names, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HFKV_AUTOLOAD": "0"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def saved(tmp_path):
    """A model that had no generation config of its own before its default was set."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    hfkv.set_default(model, "kivi", **SMALL, layers={"1": "dynamic"})
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


DEFAULT = {"cache": "kivi", **SMALL, "layers": {"1": "dynamic"}}


def test_saved_and_loaded_where_hfkv_is_on_and_where_it_is_off(saved):
    assert load_where_hfkv_is_off(saved) == ["DynamicCache", False]
    # as it was saved here, and as the process saved it again that knows nothing of it
    for folder in (saved, f"{saved}-again"):
        with open(f"{folder}/generation_config.json") as file:
            assert json.load(file)["hfkv"] == DEFAULT
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
        assert widths(cache_from(model)) == [8, None]


def test_a_saved_name_needs_hfkv_which_is_why_set_default_exists(saved):
    model = transformers.LlamaForCausalLM.from_pretrained(saved)
    hfkv.deactivate()
    try:
        with pytest.raises(ValueError, match=r"Invalid `cache_implementation` \(kivi\)"):
            GenerationConfig(cache_implementation="kivi")
        # the default is left aside while hfkv is off
        assert type(cache_from(model)) is DynamicCache
    finally:
        hfkv.activate()
    assert widths(cache_from(model)) == [8, None]
