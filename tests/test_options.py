"""Options of a technique: what a user may write, layer by layer, and what the message says about the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import transformers

import hfkv
from hfkv.cache import CacheOptions, KVLayer, check_choice, check_length, option

CONFIG = transformers.LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=5)
# full attention in layers 2 and 5 only
HYBRID = transformers.Gemma3TextConfig(
    hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=6, sliding_window=8,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmaOptions(CacheOptions):
    spellings: ClassVar[Mapping[str, str]] = {"ema_decay": "decay"}

    decay: float = option(0.5, "how fast it forgets")
    window_length: int = option(8, "tokens it sees")

    @classmethod
    def translate(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        return {cls.spellings.get(key, key): value for key, value in given.items()}


class TestParse:
    def test_defaults_values_and_spellings(self):
        assert EmaOptions.parse({}, "ema") == EmaOptions()
        assert EmaOptions.parse({"ema_decay": 0.9}, "ema").decay == 0.9

    @pytest.mark.parametrize(
        ("key", "hint"),
        [
            ("windw_length", " Did you mean 'window_length'?"),
            ("Window-Length", " Did you mean 'window_length'?"),
            ("ema-decay", " Did you mean 'ema_decay'?"),
            ("layer", " Did you mean 'layers'?"),
            ("temperature", ""),
            (4, ""),
            (None, ""),
        ],
    )
    def test_an_unknown_option_lists_the_valid_ones_and_the_closest(self, key, hint):
        with pytest.raises(ValueError, match="is not known to 'ema'") as caught:
            EmaOptions.parse({"decay": 0.1, key: 1}, "ema")
        listed = "Valid options: decay, window_length, layers."
        assert str(caught.value) == f"cache_config option {key!r} is not known to 'ema'. {listed}{hint}"

    def test_the_help_of_every_option_of_every_cache(self):
        for spec in hfkv.registry.manager().specs(hfkv.CacheSpec).values():
            if not hfkv.registry.unmet(spec):
                for field in dataclasses.fields(spec.resolve().Options):
                    assert field.metadata.get("help"), f"{spec.name}: {field.name}"

    def test_merge_replaces_an_option_however_it_is_spelt(self):
        base = {"ema_decay": 0.9, "window_length": 4}
        assert EmaOptions.merge(base, {"decay": 0.1}) == {"window_length": 4, "decay": 0.1}
        assert EmaOptions.merge({"decay": 0.9}, {"ema_decay": 0.1}) == {"ema_decay": 0.1}
        assert base == {"ema_decay": 0.9, "window_length": 4}


class TestChecks:
    @pytest.mark.parametrize("value", [2, 4])
    def test_choice(self, value):
        check_choice("nbits", value, (2, 4))

    @pytest.mark.parametrize("value", [3, "4", 4.0, True, None, [4]])
    def test_no_choice(self, value):
        with pytest.raises(ValueError, match=r"^nbits=.* is not supported\. Choose from: 1, 2, 4\.$"):
            check_choice("nbits", value, (1, 2, 4))

    def test_closest_choice(self):
        with pytest.raises(ValueError, match=r"key_axis='Chanel' is not supported.*Did you mean 'channel'\?"):
            check_choice("key_axis", "Chanel", ("channel", "token"))

    @pytest.mark.parametrize("value", [0, 8, 64])
    def test_length(self, value):
        check_length("group_size", value, multiple=8)

    @pytest.mark.parametrize("value", [-8, 12, 8.0, "8", True, None])
    def test_no_length(self, value):
        with pytest.raises(ValueError, match=r"^group_size=.* must be a multiple of 8 of at least 0$"):
            check_length("group_size", value, multiple=8)


def widths(layers=None, config=CONFIG, **options):
    cache = hfkv.make_cache("kivi", config, **options, **({} if layers is None else {"layers": layers}))
    return [layer.options.nbits if isinstance(layer, KVLayer) else None for layer in cache.layers]


class TestLayers:
    @pytest.mark.parametrize(
        ("layers", "expected"),
        [
            ({}, [4, 4, 4, 4, 4]),
            ({"0": {"nbits": 8}}, [8, 4, 4, 4, 4]),
            ({0: {"nbits": 8}}, [8, 4, 4, 4, 4]),
            ({"-1": {"nbits": 8}}, [4, 4, 4, 4, 8]),
            ({-2: {"nbits": 8}}, [4, 4, 4, 8, 4]),
            ({"1-3": "dynamic"}, [4, None, None, None, 4]),
            ({" 1-3 ": "dynamic"}, [4, None, None, None, 4]),
            ({"0-4": {"cache": "dynamic"}}, [None] * 5),
            ({"2-2": {"nbits": 8}}, [4, 4, 8, 4, 4]),
            # later entries win, whole: what is not named again is the cache's
            ({"0-4": {"nbits": 2}, "1-3": {"nbits": 8}, "2": {}}, [2, 8, 4, 8, 2]),
            ({"0-4": "dynamic", "2": "kivi"}, [None, None, 4, None, None]),
            ({"0-4": "dynamic", "2": {"cache": "kivi", "nbits": 8}}, [None, None, 8, None, None]),
        ],
    )
    def test_grammar(self, layers, expected):
        assert widths(layers) == expected

    def test_an_override_starts_from_the_caches_options(self):
        cache = hfkv.make_cache("kivi", CONFIG, nbits=2, q_group_size=64, layers={"0": {"group_size": 16}, "1": "kivi"})
        assert [layer.options.group_size for layer in cache.layers] == [16, 64, 64, 64, 64]
        assert [layer.options.nbits for layer in cache.layers] == [2, 2, 2, 2, 2]

    def test_a_range_covers_the_layers_that_the_technique_works_on(self):
        assert widths(config=HYBRID) == [None, None, 4, None, None, 4]
        assert widths({"0-3": {"nbits": 8}}, HYBRID) == [None, None, 8, None, None, 4]
        assert widths({"-1": "dynamic"}, HYBRID) == [None, None, 4, None, None, None]

    @pytest.mark.parametrize(
        ("layers", "message"),
        [
            ({"5": "dynamic"}, r"layers\['5'\] is outside this model's layers 0 to 4"),
            ({"-6": "dynamic"}, r"layers\['-6'\] is outside"),
            ({"3-5": "dynamic"}, r"layers\['3-5'\] is outside"),
            ({"3-1": "dynamic"}, r"layers\['3-1'\] is outside"),
            ({"first": "dynamic"}, r"layers\['first'\]: write a layer as '0' or '-1', or a range as '1-3'"),
            ({"1-": "dynamic"}, "write a layer as"),
            ({"1--1": "dynamic"}, "write a layer as"),
            ({"1,2": "dynamic"}, "write a layer as"),
            ({1.0: "dynamic"}, "write a layer as"),
            ({True: "dynamic"}, "write a layer as"),
            ({None: "dynamic"}, "write a layer as"),
            ({"0": 8}, r"layers\['0'\]=8 must be a dict of options or the name of a cache"),
            ({"0": None}, "must be a dict of options or the name of a cache"),
            ({"0": "kivy"}, r"layers\['0'\]='kivy' is not known.*Did you mean 'kivi'\?"),
            ({"0": "static"}, r"layers\['0'\]='static' is not known"),
            ({"0": {"cache": 4}}, r"layers\['0'\]=4 is not known"),
            ({"0": {"nbit": 8}}, r"option 'nbit' is not known to 'kivi'.*Did you mean 'nbits'\?"),
            ({"0": {"nbits": 5}}, "nbits=5 is not supported"),
            ({"0": {"cache": "dynamic", "nbits": 8}}, "'dynamic' takes no options"),
            ({"0": {"layers": {"1": "dynamic"}}}, "has overrides of its own"),
            ([("0", "dynamic")], "must be a dict such as"),
            (None, "must be a dict such as"),
        ],
    )
    def test_mistakes(self, layers, message):
        with pytest.raises(ValueError, match=message):
            hfkv.make_cache("kivi", CONFIG, layers=layers)

    def test_a_layer_that_the_technique_does_not_work_on(self):
        with pytest.raises(
            ValueError, match=r"layers\['0'\] names no full-attention layer.*: \[2, 5\]\. Other layers keep"
        ):
            hfkv.make_cache("kivi", HYBRID, layers={"0": {"nbits": 8}})


class TestMakeCache:
    def test_unknown_name(self):
        with pytest.raises(ValueError, match=r"cache_implementation='KIVI' is not known.*Did you mean 'kivi'\?"):
            hfkv.make_cache("KIVI", CONFIG)

    @pytest.mark.parametrize("given", ["gpt2", {"num_hidden_layers": 2}, None])
    def test_neither_a_model_nor_its_config(self, given):
        with pytest.raises(TypeError, match="expected a model or its config, got"):
            hfkv.make_cache("kivi", given)

    @pytest.mark.parametrize("key", ["name", "model_or_config", "named_in", "options"])
    def test_an_option_that_is_called_like_a_parameter_of_ours(self, tiny, key):
        model = tiny("llama").model
        with pytest.raises(ValueError, match=f"cache_config option {key!r} is not known to 'kivi'"):
            model.generate(tiny("llama").prompt(), cache_implementation="kivi", cache_config={key: 1}, max_new_tokens=1)
