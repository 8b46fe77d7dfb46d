"""`model.generate` with a cache asked for by name: what is used, what is refused, and what stays transformers' own."""

from __future__ import annotations

import copy
import itertools
import logging
import sys
import types

import pytest
import torch
import transformers
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache

import hfkv
from hfkv import registry
from hfkv.cache import KVLayer
from hfkv.integration import cache_argument
from hfkv.kernels.reference import ReferenceKernels
from hfkv.testing.models import decoder_cache

SMALL = {"nbits": 8, "group_size": 8, "residual_length": 8, "sink_length": 2}


def generate(model, ids=None, **arguments):
    ids = torch.arange(1, 41)[None] if ids is None else ids
    asked = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, **arguments}
    return model.generate(ids, **asked)


def cache_from(model, *args, **arguments):
    """The cache that generate used."""
    output = generate(model, *args, **arguments)
    return output.get("cache", output.get("past_key_values"))


def widths(cache):
    """Bits of each layer; None where the layer is transformers' own."""
    return [layer.options.nbits if isinstance(layer, KVLayer) else None for layer in decoder_cache(cache).layers]


def is_plain(cache):
    return type(cache) is DynamicCache


LEVELS = {"keyword": 2, "passed config": 3, "model's config": 4, "set_default": 8}
COMBINATIONS = [given for count in range(1, 5) for given in itertools.combinations(LEVELS, count)]


class TestPrecedence:
    """Each level asks for its own number of bits."""

    def run(self, model, named, **arguments):
        def at(level):
            return {"cache_implementation": "kivi", "cache_config": {"nbits": LEVELS[level]}} if level in named else {}

        if "set_default" in named:
            hfkv.set_default(model, "kivi", nbits=LEVELS["set_default"])
        model.generation_config.update(**at("model's config"))
        if "passed config" in named:
            arguments["generation_config"] = GenerationConfig(**at("passed config"))
        return cache_from(model, **{**at("keyword"), **arguments})

    @pytest.mark.parametrize("named", COMBINATIONS, ids="+".join)
    def test_keyword_then_passed_then_model_then_default(self, tiny, named):
        cache = self.run(tiny("llama").model, named)
        # combinations come in the order of precedence
        assert widths(cache) == [LEVELS[named[0]]] * 3

    @pytest.mark.parametrize("named", list(LEVELS)[1:])
    @pytest.mark.parametrize("name", ["dynamic", "static"])
    def test_a_keyword_switches_it_off(self, tiny, named, name):
        cache = self.run(tiny("llama").model, [named], cache_implementation=name)
        assert type(cache) is (DynamicCache if name == "dynamic" else transformers.StaticCache)

    @pytest.mark.parametrize("named", ["model's config", "set_default"])
    def test_a_passed_config_switches_it_off(self, tiny, named):
        off = GenerationConfig(cache_implementation="dynamic", max_new_tokens=2)
        assert is_plain(self.run(tiny("llama").model, [named], generation_config=off))

    @pytest.mark.parametrize("named", ["passed config", "model's config", "set_default"])
    def test_options_of_a_keyword_are_for_the_cache_of_a_lower_level(self, tiny, named):
        cache = self.run(tiny("llama").model, [named], cache_config={"nbits": 2})
        assert widths(cache) == [2, 2, 2]

    def test_options_of_another_cache_do_not_leak(self, tiny):
        model = tiny("llama").model
        model.generation_config.cache_implementation = "quantized"
        model.generation_config.cache_config = {"backend": "no such backend", "nbits": 2}
        assert widths(cache_from(model, cache_implementation="kivi")) == [4, 4, 4]

    def test_options_of_the_same_cache_are_kept(self, tiny):
        model = tiny("llama").model
        model.generation_config.cache_implementation = "kivi"
        model.generation_config.cache_config = {"nbits": 2}
        assert widths(cache_from(model, cache_implementation="kivi")) == [2, 2, 2]


class TestIgnoredOptions:
    @pytest.mark.parametrize("name", [None, "dynamic", "static", "offloaded"])
    def test_config_that_the_cache_does_not_read(self, tiny, name):
        with pytest.raises(ValueError, match=f"'nbits': 4.*would be ignored: cache_implementation={name!r}.*kivi"):
            generate(tiny("llama").model, cache_implementation=name, cache_config={"nbits": 4})

    def test_config_beside_a_cache_that_was_passed(self, tiny):
        model = tiny("llama").model
        for cache in (DynamicCache(config=model.config), hfkv.make_cache("kivi", model)):
            with pytest.raises(ValueError, match="would be ignored: the cache that was passed"):
                generate(model, cache_config={"nbits": 4}, **{cache_argument(model): cache})

    def test_config_that_is_no_dict(self, tiny):
        for config in ([4], "nbits=4", 4):
            with pytest.raises(ValueError, match="must be a dict"):
                generate(tiny("llama").model, cache_implementation="kivi", cache_config=config)

    def test_a_cache_and_a_name(self, tiny):
        model = tiny("llama").model
        given = {cache_argument(model): hfkv.make_cache("kivi", model)}
        with pytest.raises(ValueError, match="Passing both `cache_implementation`"):
            generate(model, cache_implementation="kivi", **given)

    def test_no_cache_at_all(self, tiny):
        model = tiny("llama").model
        output = generate(model, use_cache=False, cache_implementation="kivi", cache_config={"nbits": 2})
        assert output.get("cache", output.get("past_key_values")) is None
        assert torch.equal(output.sequences, generate(model, use_cache=False).sequences)

    def test_name_that_nobody_has(self, tiny):
        with pytest.raises(ValueError, match=r"Invalid `cache_implementation` \(kivy\).*'kivi'"):
            generate(tiny("llama").model, cache_implementation="kivy")

    def test_transformers_own_quantized_cache_reads_it_and_leaves_the_dict(self, tiny):
        pytest.importorskip("hqq", reason="a backend of transformers' own quantized cache")
        config = {"backend": "hqq", "nbits": 4, "q_group_size": 16, "axis_key": 1, "axis_value": 1}
        before = dict(config)
        for family in ("llama", "qwen2", "llama"):
            model = tiny(family).model
            cache = cache_from(model, cache_implementation="quantized", cache_config=config)
            assert len(cache.layers) == model.config.num_hidden_layers
            assert config == before


class TestContinuousBatching:
    @pytest.mark.parametrize("entry", ["generate_batch", "init_continuous_batching"])
    def test_our_names_and_options_are_refused(self, tiny, entry):
        model = tiny("llama").model

        def run(generation_config=None):
            arguments = {"inputs": [[1, 2, 3]]} if entry == "generate_batch" else {}
            return getattr(model, entry)(**arguments, generation_config=generation_config)

        with pytest.raises(NotImplementedError, match=r"continuous batching.*cache_implementation='kivi'"):
            run(GenerationConfig(cache_implementation="kivi"))
        with pytest.raises(ValueError, match=r"continuous batching would ignore cache_config=\{'nbits': 4\}"):
            run(GenerationConfig(cache_config={"nbits": 4}))
        model.generation_config.cache_implementation = "kivi"
        with pytest.raises(NotImplementedError, match=r"continuous batching.*cache_implementation='kivi'"):
            run()

    def test_options_for_the_paged_cache_of_generate_are_refused(self, tiny):
        with pytest.raises(ValueError, match="continuous batching would ignore cache_config"):
            generate(tiny("llama").model, cache_implementation="paged", cache_config={"nbits": 4})

    def test_a_default_is_left_aside_and_told(self, tiny, caplog):
        # continuous batching changes the model's attention
        model = copy.deepcopy(tiny("llama").model)
        config = GenerationConfig(max_new_tokens=3, eos_token_id=-1)
        with caplog.at_level(logging.WARNING, logger="hfkv"):
            model.init_continuous_batching(config)
            assert caplog.text == ""
            hfkv.set_default(model, "kivi", nbits=2)
            manager = model.init_continuous_batching(config)
        assert "the default 'kivi' is not used" in caplog.text
        assert type(manager).__name__ == "ContinuousBatchingManager"


class TestTheUsersDict:
    def test_is_never_changed_and_serves_models_of_any_depth(self, tiny):
        config = {**SMALL, "layers": {"0": {"nbits": 4}, "-1": {"cache": "kivi", "nbits": 2}}}
        before = copy.deepcopy(config)
        for family, depth in (("llama", 3), ("qwen2", 2), ("llama", 3)):
            cache = cache_from(tiny(family).model, cache_implementation="kivi", cache_config=config)
            assert widths(cache) == [4, *[8] * (depth - 2), 2]
            assert config == before

    def test_is_not_changed_by_building_or_setting_a_default(self, tiny):
        model = tiny("llama").model
        config = {"nbits": 4, "layers": {"0": {"nbits": 8}}}
        before = copy.deepcopy(config)
        hfkv.make_cache("kivi", model, **config)
        hfkv.set_default(model, "kivi", **config)
        cache_from(model)
        assert config == before
        # and what the user does to it later does not reach the model
        config["layers"]["0"]["nbits"] = 2
        assert widths(cache_from(model)) == [8, 4, 4]

    def test_a_config_object(self, tiny):
        class Config:
            def to_dict(self):
                return {"nbits": 2}

        assert widths(cache_from(tiny("llama").model, cache_implementation="kivi", cache_config=Config())) == [2, 2, 2]


class TestEverydayUse:
    def test_inference_mode(self, tiny):
        model = tiny("llama").model
        expected = generate(model, cache_implementation="kivi", cache_config=SMALL).sequences
        with torch.inference_mode():
            output = generate(model, cache_implementation="kivi", cache_config=SMALL)
        assert torch.equal(output.sequences, expected)
        # what was made in inference mode can be used on
        cache = output.get("cache", output.get("past_key_values"))
        assert hfkv.memory(cache).packed_bytes > 0

    def test_config_is_saved_loaded_and_copied(self, tiny, tmp_path):
        config = GenerationConfig(cache_implementation="kivi", cache_config={**SMALL, "layers": {"1-2": "dynamic"}})
        config.save_pretrained(tmp_path)
        for again in (GenerationConfig.from_pretrained(tmp_path), copy.deepcopy(config)):
            again.max_new_tokens = 2
            assert widths(cache_from(tiny("llama").model, generation_config=again)) == [8, None, None]

    def test_pipeline(self, model_folder):
        pipe = transformers.pipeline("text-generation", model=str(model_folder))
        caches = []
        prepare = type(pipe.model)._prepare_cache_for_generation

        def watch(generation_config, model_kwargs, *args):
            result = prepare(pipe.model, generation_config, model_kwargs, *args)
            caches.append(model_kwargs[cache_argument(pipe.model)])
            return result

        pipe.model._prepare_cache_for_generation = watch
        asked = {"max_new_tokens": 8, "do_sample": False}
        plain = pipe("the cat sat on the mat", **asked)
        # nothing is packed: the same text
        packed = pipe(
            "the cat sat on the mat", cache_implementation="kivi", cache_config={"residual_length": 64}, **asked
        )
        assert packed == plain
        assert is_plain(caches[0])
        assert widths(caches[1]) == [4, 4, 4]

    def test_offloaded_stays_with_transformers(self, tiny):
        """On a machine without an accelerator it fails or works, but as it does without hfkv."""

        def outcome():
            try:
                return generate(tiny("llama").model, cache_implementation="offloaded").sequences.tolist()
            except Exception as error:
                return repr(error)

        active = outcome()
        hfkv.deactivate()
        try:
            assert outcome() == active
        finally:
            hfkv.activate()

    def test_a_cache_made_while_active_outlives_deactivation(self, tiny):
        model = tiny("llama").model
        expected = generate(model, cache_implementation="kivi", cache_config=SMALL).sequences
        cache = hfkv.make_cache("kivi", model, **SMALL)
        hfkv.deactivate()
        try:
            found = generate(model, **{cache_argument(model): cache}).sequences
        finally:
            hfkv.activate()
        assert torch.equal(found, expected)


class PlainLayer(KVLayer):
    """The least that a technique can be."""

    stored: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(self, key_states, value_states, *args, **kwargs):
        self.lazy_initialization(key_states, value_states)
        new = key_states, value_states
        self.stored = (
            new if self.stored is None else tuple(map(lambda old, add: torch.cat([old, add], 2), self.stored, new))
        )
        return self.stored

    def get_seq_length(self):
        return 0 if self.stored is None else self.stored[0].shape[2]

    def dense(self):
        return self.stored


class TestRegisteredInThisProcess:
    @pytest.fixture
    def home(self, monkeypatch):
        """A module that records can name."""
        home = types.ModuleType("my_notebook")
        monkeypatch.setitem(sys.modules, home.__name__, home)
        return home

    @pytest.fixture
    def plugin(self, home):
        home.Layer = PlainLayer

        def make(name):
            plugin = types.ModuleType("cell")
            spec = hfkv.CacheSpec(name=name, summary="", load="my_notebook:Layer")
            plugin.hfkv_caches = hfkv.hookimpl(specname="hfkv_caches")(lambda: [spec])
            return plugin

        return make

    def test_its_name_is_good_at_once_and_gone_with_it(self, tiny, register, plugin):
        model = tiny("llama").model
        register(plugin("plain-copy"), "cell")
        output = generate(model, cache_implementation="plain-copy")
        cache = output.get("cache", output.get("past_key_values"))
        assert [type(layer) for layer in cache.layers] == [PlainLayer] * 3
        assert torch.equal(output.sequences, generate(model).sequences)
        # beside the others, layer by layer
        mixed = cache_from(model, cache_implementation="kivi", cache_config={"layers": {"1": "plain-copy"}})
        assert type(mixed.layers[1]) is PlainLayer
        assert [type(layer).__name__ for layer in mixed.layers[::2]] == ["KiviLayer"] * 2
        hfkv.unregister("cell")
        with pytest.raises(ValueError, match=r"Invalid `cache_implementation` \(plain-copy\)"):
            GenerationConfig(cache_implementation="plain-copy")
        GenerationConfig(cache_implementation="kivi")

    def test_running_the_cell_again(self, tiny, register, plugin):
        register(plugin("first-name"), "cell")
        register(plugin("second-name"), "cell")
        assert type(cache_from(tiny("llama").model, cache_implementation="second-name").layers[0]) is PlainLayer
        with pytest.raises(ValueError, match=r"Invalid `cache_implementation` \(first-name\)"):
            GenerationConfig(cache_implementation="first-name")

    def test_kernels_are_chosen_anew(self, tiny, register, home, monkeypatch):
        monkeypatch.delenv("HFKV_KERNELS", raising=False)
        model, calls = tiny("llama").model, []

        class Kernels(ReferenceKernels):
            name = "mine"

            def attend(self, *args):
                calls.append(self.name)
                return super().attend(*args)

        class Plugin:
            @hfkv.hookimpl
            def hfkv_kernels(self):
                yield hfkv.KernelSpec(name="mine", summary="", load="my_notebook:kernels", priority=1000)

        asked = {"cache_implementation": "kivi", "cache_config": SMALL}
        expected = generate(model, **asked).sequences
        home.kernels = Kernels()
        register(Plugin(), "cell")
        assert torch.equal(generate(model, **asked).sequences, expected)
        # three steps after the prompt, three layers
        assert calls == ["mine"] * 9
        hfkv.unregister("cell")
        generate(model, **asked)
        assert len(calls) == 9

    def test_a_transformers_name_is_refused(self, plugin):
        with pytest.raises(ValueError, match="'static' is built in"):
            hfkv.register(plugin("static"), "cell")
        assert "cell" not in {known.name for known in registry.plugins()}
