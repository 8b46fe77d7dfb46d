"""How a cache is asked for: options, layers, saved settings, pipelines. Nothing that was asked for is ignored."""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import hfkv
from hfkv.cache.cache import HFKVCache
from hfkv.cache.layer import KVLayer
from hfkv.testing.cases import CacheCase
from hfkv.testing.matrix import every_attention, every_family, families
from hfkv.testing.models import NEW_TOKENS, PADDING, PROMPT_LENGTH, VOCABULARY
from hfkv.testing.oracle import Judge


def test_unknown_option_is_refused(hfkv_case: CacheCase) -> None:
    """A misspelt option is an error that lists the options and names the closest."""
    judge = Judge(hfkv_case, "llama", "sdpa")
    valid = [*(field.name for field in dataclasses.fields(hfkv_case.layer_class.Options)), "layers"]
    for name in valid:
        misspelt = f"{name[:-1]}_{name[-1]}"
        with pytest.raises(ValueError, match=misspelt) as caught:
            hfkv_case.make(judge.tiny.model, **{misspelt: 1})
        for word in (*valid, f"Did you mean {name!r}", repr(hfkv_case.spec.name)):
            assert word in str(caught.value), f"the error for {misspelt!r} must say {word}: {caught.value}"


def test_options_are_not_mutated(hfkv_case: CacheCase) -> None:
    """One ``cache_config`` serves models of different depth, and stays the user's."""
    options = {**hfkv_case.options, "layers": {"0": "dynamic"}}
    before = copy.deepcopy(options)
    for family in ("llama", "qwen2", "llama"):
        tiny = Judge(hfkv_case, family, "sdpa").tiny
        output = tiny.generate(tiny.prompt(), cache_implementation=hfkv_case.spec.name, cache_config=options)
        assert len(tiny.cache_of(output).layers) == tiny.model.config.num_hidden_layers
        assert options == before, "cache_config was changed"


def test_layers_have_their_own_settings(hfkv_case: CacheCase) -> None:
    """``layers`` reaches the layers that it names and no other, and later entries win."""
    if not hfkv_case.options:
        pytest.skip(f"{hfkv_case.spec.name} declares no contract_options: there is nothing to override with")
    judge = Judge(hfkv_case, "llama", "sdpa")
    own = dict(hfkv_case.options)
    options = hfkv_case.layer_class.Options
    declared, default = options.parse(own, hfkv_case.spec.name), options.parse({}, hfkv_case.spec.name)

    def layers(settings: dict[str, Any]) -> list[Any]:
        return hfkv.make_cache(hfkv_case.spec.name, judge.tiny.model, layers=settings).layers

    first, kept, last = layers({"0-2": own, "1": "dynamic"})
    assert type(first) is type(last) is hfkv_case.layer_class
    assert type(kept) is DynamicLayer, "'dynamic' leaves a layer as transformers makes it"
    assert first.options == last.options == declared, "the options of layers={'0-2': ...} did not reach layers 0 and 2"
    first, _, last = layers({"-1": own})
    assert last.options == declared, "the options of layers={'-1': ...} did not reach the last layer"
    assert first.options == default, "layers={'-1': ...} changed the first layer"


@families(["gemma3", "gemma4"])
@every_attention
def test_hybrid_models_keep_their_other_layers(hfkv_case: CacheCase, family: str, attention: str) -> None:
    """Full-attention layers get the technique, sharing layers stay, and sliding ones hold no more than their window."""
    judge = Judge(hfkv_case, family, attention)
    config = judge.tiny.model.config
    cache = judge.tiny.cache_of(judge.generate(judge.tiny.prompt()))
    owners = config.num_hidden_layers - getattr(config, "num_kv_shared_layers", 0)
    plain = judge.tiny.plain_cache()
    judge.tiny.feed(plain, judge.tiny.prompt(length=cache.get_seq_length()))
    for index, layer in enumerate(cache.layers):
        where = f"layer {index} of {judge.tiny}, {config.layer_types[index]}, is {type(layer).__name__}"
        if index >= owners:
            assert not isinstance(layer, KVLayer), f"{where}, and reuses another layer's keys and values"
        elif config.layer_types[index] == "full_attention":
            assert isinstance(layer, hfkv_case.layer_class), where
        elif type(layer) is not DynamicSlidingWindowLayer:
            assert isinstance(layer, hfkv_case.layer_class) and layer.is_sliding, where
            seen, expected = layer.get_mask_sizes(1), plain.get_mask_sizes(1, index)
            assert seen == expected, f"{where}, and attention sees {seen} in place of {expected}, transformers' window"


@every_family
def test_generation_config_is_saved_and_loaded(hfkv_case: CacheCase, family: str, tmp_path: Path) -> None:
    """A saved `GenerationConfig` asks for the same cache with the same options."""
    judge = Judge(hfkv_case, family, "sdpa")
    tiny = judge.tiny
    settings = copy.deepcopy(tiny.model.generation_config)
    options = hfkv_case.options_for(tiny.model)
    settings.update(
        cache_implementation=hfkv_case.spec.name,
        cache_config=options,
        max_new_tokens=NEW_TOKENS,
        suppress_tokens=[PADDING],
        return_dict_in_generate=True,
        output_logits=True,
    )
    settings.save_pretrained(tmp_path)
    loaded = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert (loaded.cache_implementation, loaded.cache_config) == (hfkv_case.spec.name, options)
    ids = tiny.prompt()
    output = tiny.model.generate(**tiny.inputs(ids), generation_config=loaded)
    judge.is_ours(tiny.cache_of(output))
    actual, expected = judge.generated(output), judge.generated(judge.generate(ids))
    judge.same(actual, expected, "asked for by a loaded GenerationConfig", "those of keyword arguments")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[HFKVCache]:
    """The caches that are made while a test runs."""
    caches: list[HFKVCache] = []
    original = HFKVCache.__init__

    def __init__(self: HFKVCache, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        caches.append(self)

    monkeypatch.setattr(HFKVCache, "__init__", __init__)
    return caches


@every_attention
def test_pipeline(hfkv_case: CacheCase, attention: str, made: list[HFKVCache]) -> None:
    """``pipeline("text-generation")`` decodes from the cache that it is asked for."""
    judge = Judge(hfkv_case, "llama", attention)
    pipe = transformers.pipeline("text-generation", model=judge.tiny.model, tokenizer=_tokenizer())
    prompt = " ".join(f"t{token}" for token in judge.tiny.prompt()[0].tolist())
    asked = {"cache_implementation": hfkv_case.spec.name, "cache_config": dict(hfkv_case.options)}
    (answer,) = pipe(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, suppress_tokens=[PADDING], **asked)
    (cache,) = made
    judge.is_ours(cache)
    sequence = torch.tensor([[int(token) for token in re.findall(r"t(\d+)", answer["generated_text"])]])
    assert sequence.shape[1] == PROMPT_LENGTH + NEW_TOKENS
    assert cache.get_seq_length() == sequence.shape[1] - 1, "all but the last token have been seen by the cache"
    logits = judge.replay(sequence, PROMPT_LENGTH)
    logits[..., PADDING] = -torch.inf
    chosen = logits.gather(-1, sequence[:, PROMPT_LENGTH:, None]).squeeze(-1)
    behind = float((logits.amax(dim=-1) - chosen).max())
    assert behind < 1e-3, f"the text is not the greedy one of the same cache: a token is {behind:.3g} behind the best"


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    # special tokens, which the text leaves out, have no number of their own
    vocabulary = {f"t{token}": token for token in range(VOCABULARY)} | {"pad": VOCABULARY, "unknown": VOCABULARY + 1}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="unknown"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="pad", unk_token="unknown")
