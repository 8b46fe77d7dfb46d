"""Asking for a cache by name on models of every build: what is refused, and what it works beside."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

import hfkv
from hfkv.cache import KVLayer
from hfkv.integration import cache_argument
from hfkv.testing.models import decoder_cache, logits_error

SMALL = {"nbits": 8, "group_size": 8, "residual_length": 8, "sink_length": 2}
TOKENS = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


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


def llama(depth):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": depth, "initializer_range": 0.1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **HEADS, **TOKENS)).eval()


class TestModels:
    @pytest.mark.parametrize("kept", [(1, 2, 3), (0, 2), (1, 3)], ids=["first", "odd", "even"])
    def test_dropped_layers_leave_stale_layer_idx(self, kept):
        """A model that lost its first, or every second layer: their rows in the cache stay empty."""
        model = llama(depth=4)
        model.model.layers = torch.nn.ModuleList(
            layer for index, layer in enumerate(model.model.layers) if index in kept
        )
        plain = generate(model, use_cache=False, output_logits=True)
        for residual_length in (64, 8):
            options = {**SMALL, "residual_length": residual_length}
            output = generate(model, cache_implementation="kivi", cache_config=options, output_logits=True)
            error = logits_error(torch.stack(output.logits), torch.stack(plain.logits)).max()
            # all in full precision, and then most of it at 8 bits
            assert error < (1e-4 if residual_length == 64 else 0.02)

    def test_vision_language_config(self):
        """The depth and the heads are those of the text part."""
        text = {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            **HEADS,
            **TOKENS,
        }
        vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 5}
        vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8, "projection_dim": 16}
        config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=95)
        model = transformers.LlavaForConditionalGeneration(config).eval()
        cache = cache_from(model, cache_implementation="kivi", cache_config=SMALL, eos_token_id=None)
        assert widths(cache) == [8, 8, 8]
        assert cache.layers[0].keys.shape[1::2] == (2, 16)
        assert widths(hfkv.make_cache("kivi", config, layers={"-1": "dynamic"})) == [4, 4, None]

    def test_encoder_decoder_whose_override_calls_super(self):
        part = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 8}
        part |= {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8, **HEADS, **TOKENS}
        config = transformers.T5GemmaConfig(encoder=dict(part), decoder=dict(part), **{**TOKENS, "bos_token_id": 1})
        torch.manual_seed(0)
        model = transformers.T5GemmaForConditionalGeneration(config).eval()
        options = {"cache_implementation": "kivi", "cache_config": SMALL, "max_new_tokens": 30}
        output = generate(model, output_logits=True, **options)
        cache = output.get("cache", output.get("past_key_values"))
        assert isinstance(cache, EncoderDecoderCache)
        assert widths(cache) == [None, 8]
        # cross-attention looks at the whole source, as without hfkv
        assert [type(layer).__name__ for layer in cache.cross_attention_cache.layers] == ["DynamicLayer"] * 2
        assert cache.self_attention_cache.layers[1].get_seq_length() == 30
        assert hfkv.memory(cache.self_attention_cache).packed_bytes > 0

    def test_attention_layers_of_a_hybrid_with_state_space_layers(self):
        config = transformers.JambaConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=4,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=2,
            mamba_d_state=8,
            use_mamba_kernels=False,
            initializer_range=0.2,
            **HEADS,
            **TOKENS,
        )
        torch.manual_seed(0)
        model = transformers.JambaForCausalLM(config).eval()
        options = {"cache_implementation": "kivi", "cache_config": {**SMALL, "nbits": 4}}
        output = generate(model, output_logits=True, **options)
        cache = output.get("cache", output.get("past_key_values"))
        assert widths(cache) == [None, 4, None, 4]
        plain = generate(model, output_logits=True)
        # the first token was decoded from exact keys and values
        assert torch.allclose(output.logits[0], plain.logits[0], atol=1e-5)
        assert not torch.stack(output.logits).isnan().any()

    @pytest.mark.parametrize("name", ["Mamba", "Mistral"])
    def test_a_model_without_full_attention_is_refused(self, name):
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, **TOKENS}
        if name == "Mistral":
            sizes |= {"intermediate_size": 32, "sliding_window": 8, **HEADS}
        config = getattr(transformers, f"{name}Config")(**sizes)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        for ask in (
            lambda: generate(model, cache_implementation="kivi"),
            lambda: hfkv.make_cache("kivi", config),
            lambda: hfkv.set_default(model, "kivi"),
        ):
            with pytest.raises(
                NotImplementedError, match=f"'kivi' works on full-attention layers, and {name}Config has none"
            ):
                ask()
        # and goes on as before
        generate(model)

    def test_a_model_that_keeps_its_state_itself_is_refused(self):
        config = transformers.RwkvConfig(hidden_size=32, attention_hidden_size=32, num_hidden_layers=2, **TOKENS)
        model = transformers.RwkvForCausalLM(config)
        for ask in (lambda: generate(model, cache_implementation="kivi"), lambda: hfkv.set_default(model, "kivi")):
            with pytest.raises(NotImplementedError, match="RwkvForCausalLM keeps its state itself and takes no cache"):
                ask()

    def test_a_model_that_overrides_cache_preparation_is_refused(self):
        encoder = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        encoder |= {"subsampling_conv_channels": 8, "num_mel_bins": 16}
        config = transformers.ParakeetRNNTConfig(
            encoder_config=encoder, vocab_size=17, decoder_hidden_size=16, blank_token_id=16, num_decoder_layers=1
        )
        model = transformers.ParakeetForRNNT(config).eval()
        with pytest.raises(NotImplementedError, match="ParakeetForRNNT prepares its own cache and does not read"):
            model.generate(input_features=torch.zeros(1, 32, 16), cache_implementation="kivi")
        with pytest.raises(NotImplementedError, match="ParakeetForRNNT prepares its own cache"):
            hfkv.set_default(model, "kivi")

    def test_overrides_that_come_to_ours_in_the_end(self, tiny):
        class WithSuper(transformers.LlamaForCausalLM):
            def _prepare_cache_for_generation(self, *args, **kwargs):
                return super()._prepare_cache_for_generation(*args, **kwargs)

        class ByName(transformers.LlamaForCausalLM):
            def _prepare_cache_for_generation(self, *args, **kwargs):
                return transformers.GenerationMixin._prepare_cache_for_generation(self, *args, **kwargs)

        def decorate(function):
            @functools.wraps(function)
            def decorated(*args, **kwargs):
                return function(*args, **kwargs)

            return decorated

        class Decorated(transformers.LlamaForCausalLM):
            @decorate
            def _prepare_cache_for_generation(self, *args, **kwargs):
                return super()._prepare_cache_for_generation(*args, **kwargs)

        class Below(Decorated):
            pass

        class Without(WithSuper):
            def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
                model_kwargs["mine"] = True

        config = tiny("llama").model.config
        for model_class in (WithSuper, ByName, Decorated, Below):
            assert widths(cache_from(model_class(config), cache_implementation="kivi")) == [4, 4, 4]
        with pytest.raises(NotImplementedError, match="Without prepares its own cache"):
            generate(Without(config), cache_implementation="kivi")

    def test_diffusion_gemma_refuses_our_names_as_it_builds_its_own_caches(self):
        from transformers.models.diffusion_gemma import generation_diffusion_gemma as module

        with pytest.raises(ValueError, match="`cache_implementation` must be one of"):
            module.DiffusionGemmaGenerationConfig(cache_implementation="kivi")
        assert "static" in module.ALL_CACHE_IMPLEMENTATIONS

    def test_a_model_whose_forward_names_no_cache(self, tiny):
        model = copy.copy(tiny("llama").model)
        inner = model.forward
        model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
        assert cache_argument(model) == cache_argument(tiny("llama").model)
        assert widths(cache_from(model, cache_implementation="kivi")) == [4, 4, 4]


ASKED = {"cache_implementation": "kivi", "cache_config": SMALL}


class TestAssisted:
    def models(self, tiny):
        target = tiny("llama")
        torch.manual_seed(1)
        config = copy.deepcopy(target.model.config)
        # shallower than the target: options for one do not fit the other
        config.num_hidden_layers = 1
        return target.model, transformers.LlamaForCausalLM(config).eval()

    def same_as_alone(self, target, assistant, **asked):
        """Greedy tokens do not depend on the assistant; the caches of the target, and of the assistant's rounds."""
        rounds = []
        prepare = type(assistant)._prepare_cache_for_generation

        def watch(generation_config, model_kwargs, *args):
            prepare(assistant, generation_config, model_kwargs, *args)
            rounds.append(model_kwargs[cache_argument(assistant)])

        assistant._prepare_cache_for_generation = watch
        assisted = generate(target, assistant_model=assistant, max_new_tokens=10, **asked)
        alone = generate(target, max_new_tokens=10, **asked)
        assert torch.equal(assisted.sequences, alone.sequences)
        assert len(rounds) > 1
        # one cache, of the first round
        assert len({id(cache) for cache in rounds}) == 1
        return assisted.get("cache", assisted.get("past_key_values")), rounds[0]

    def test_kivi_on_the_target(self, tiny):
        target, assistant = self.models(tiny)
        asked = {**ASKED, "cache_config": {**SMALL, "layers": {"2": "dynamic"}}}
        of_target, of_assistant = self.same_as_alone(target, assistant, **asked)
        assert widths(of_target) == [8, 8, None]
        assert is_plain(of_assistant)

    def test_kivi_on_the_assistant(self, tiny):
        target, assistant = self.models(tiny)
        assistant.generation_config.update(**ASKED)
        of_target, of_assistant = self.same_as_alone(target, assistant)
        assert is_plain(of_target)
        assert widths(of_assistant) == [8]

    def test_kivi_on_both(self, tiny):
        target, assistant = self.models(tiny)
        assistant.generation_config.update(cache_implementation="kivi", cache_config={**SMALL, "nbits": 2})
        of_target, of_assistant = self.same_as_alone(target, assistant, **ASKED)
        assert widths(of_target) == [8, 8, 8]
        assert widths(of_assistant) == [2]

    def test_the_default_of_either(self, tiny):
        target, assistant = self.models(tiny)
        hfkv.set_default(target, "kivi", **SMALL, layers={"2": "dynamic"})
        of_target, of_assistant = self.same_as_alone(target, assistant)
        assert widths(of_target) == [8, 8, None]
        assert is_plain(of_assistant)
        hfkv.set_default(target, None)
        hfkv.set_default(assistant, "kivi", **SMALL)
        of_target, of_assistant = self.same_as_alone(target, assistant)
        assert is_plain(of_target)
        assert widths(of_assistant) == [8]


class TestCompile:
    @pytest.fixture(autouse=True)
    def fresh(self):
        torch._dynamo.reset()
        # past the limit dynamo runs the rest uncompiled, and the test would show nothing
        with torch._dynamo.config.patch(recompile_limit=64):
            yield
        torch._dynamo.reset()

    def test_a_compiled_forward(self):
        model = llama(depth=1)
        expected = generate(model, max_new_tokens=2, **ASKED).sequences
        model.forward = torch.compile(model.forward, backend="eager")
        output = generate(model, max_new_tokens=2, **ASKED)
        assert torch.equal(output.sequences, expected)
        assert widths(output.get("cache", output.get("past_key_values"))) == [8]

    def test_a_compile_config_is_no_obstacle(self, tiny):
        config = transformers.CompileConfig(backend="eager")
        assert widths(cache_from(tiny("llama").model, compile_config=config, **ASKED)) == [8, 8, 8]

    def test_models_without_our_caches_compile_in_one_graph(self):
        model = llama(depth=1)
        # from here on "sdpa" is ours
        generate(model, **ASKED)
        ids = torch.arange(1, 20)[None]
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits
            found = torch.compile(model.forward, backend="eager", fullgraph=True)(ids, use_cache=False).logits
        assert torch.allclose(found, expected, atol=1e-5)
