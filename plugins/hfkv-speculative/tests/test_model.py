"""The assistant "model": other vocabularies, other tokenizers, other chance."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

import hfkv
from hfkv.testing.cases import AssistantCase
from hfkv.testing.contracts import test_assistants as contracts
from hfkv.testing.models import load


def byte_tokenizer(alphabet):
    """A tokenizer whose tokens are bytes, numbered in the order of the alphabet."""
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


ALWAYS = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}


def resized(model, vocabulary):
    """The same model with a vocabulary of another size, as padding to a round number makes it."""
    other = copy.deepcopy(model)
    other.resize_token_embeddings(vocabulary, mean_resizing=False)
    return other


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("vocabulary", [88, 104])
def test_padded_vocabulary_is_no_obstacle(vocabulary, do_sample):
    """Report: the same tokenizer, 136 against 128 rows, is refused."""
    tiny = load("llama", "sdpa")
    draft = resized(tiny.model, vocabulary)
    texts = []
    for options in (ALWAYS, {"num_assistant_tokens": 1}):
        torch.manual_seed(0)
        assisted = hfkv.assistant("model", tiny.model, assistant_model=draft, **options)
        output = tiny.generate(tiny.prompt(rows=2), do_sample=do_sample, max_new_tokens=40, **assisted)
        texts.append(output.sequences.tolist())
        if options is ALWAYS:
            # the weights are the target's; the smaller vocabulary lacks tokens of the text
            assert hfkv.stats(output).acceptance_rate > (0.99 if vocabulary == 104 else 0)
    assert texts[0] == texts[1]
    if not do_sample:
        assert texts[0] == tiny.generate(tiny.prompt(rows=2), max_new_tokens=40).sequences.tolist()


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 0.7), (1.5, 4, 1.0)])
def test_rejection_sampling_is_exact(temperature, top_k, top_p):
    spec = next(
        spec
        for plugin in hfkv.plugins()
        for spec in plugin.specs
        if isinstance(spec, hfkv.AssistantSpec) and spec.name == "model"
    )

    class Rejecting(AssistantCase):
        def make(self, model, **options):
            return super().make(model, draft_sampling="rejection", **options)

    contracts.test_sampling_is_exact(Rejecting(spec), temperature, top_k, top_p)


def test_rejection_accepts_more_where_models_differ():
    tiny = load("llama", "sdpa")
    rates = {}
    for how in ("coupled", "rejection"):
        torch.manual_seed(0)
        assisted = hfkv.assistant("model", tiny.model, assistant_model=tiny.assistant, draft_sampling=how, **ALWAYS)
        output = tiny.generate(
            tiny.prompt(rows=8), do_sample=True, temperature=3.0, top_k=0, max_new_tokens=100, **assisted
        )
        rates[how] = hfkv.stats(output).acceptance_rate
    assert rates["coupled"] > 0.5
    assert rates["rejection"] > rates["coupled"]


def test_other_tokenizer():
    """The draft model has the target's weights under other numbers: through text, all drafts are accepted."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    order = list(range(256))
    random.Random(0).shuffle(order)
    target, draft = byte_tokenizer(alphabet), byte_tokenizer([alphabet[index] for index in order])
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    other = copy.deepcopy(model)
    for weights in (other.get_input_embeddings().weight, other.get_output_embeddings().weight):
        weights.data = weights.data[order]
    asked = {"max_new_tokens": 32, "do_sample": False, "suppress_tokens": list(range(94, 256)), "pad_token_id": 0}
    # the draft model's processors are none: it may say what the target suppresses, and is then rejected
    inputs = target(["a text", "another, longer text"], return_tensors=None).input_ids
    longest = max(map(len, inputs))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in inputs])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in inputs])
    with torch.no_grad():
        other.get_output_embeddings().weight[[place for place, index in enumerate(order) if index >= 94]] = 0
    assisted = hfkv.assistant(
        "model", model, assistant_model=other, tokenizer=target, assistant_tokenizer=draft, **ALWAYS
    )
    expected = model.generate(ids, attention_mask=mask, **asked)
    actual = model.generate(ids, attention_mask=mask, **asked, **assisted)
    assert actual.tolist() == expected.tolist()
    assert hfkv.stats(actual).acceptance_rate > 0.9


def test_errors():
    tiny = load("llama", "sdpa")
    model = tiny.model
    with pytest.raises(ValueError, match="assistant_model is missing"):
        hfkv.assistant("model", model)
    with pytest.raises(TypeError, match="must be a language model, its folder or ID; got int"):
        hfkv.assistant("model", model, assistant_model=3)
    with pytest.raises(ValueError, match="assistant_model is the model itself"):
        hfkv.assistant("model", model, assistant_model=model)
    with pytest.raises(ValueError, match="tokenizer and assistant_tokenizer go together"):
        hfkv.assistant("model", model, assistant_model=tiny.assistant, tokenizer=object())
    with pytest.raises(ValueError, match=r"draft_sampling='rejection' needs both models'"):
        hfkv.assistant(
            "model", model, assistant_model=tiny.assistant, tokenizer=object(), assistant_tokenizer=object(),
            draft_sampling="rejection",
        )  # fmt: skip
    with pytest.raises(NotImplementedError, match="has an encoder"):
        hfkv.assistant("model", model, assistant_model=load("t5", "sdpa").model)


def test_draft_model_by_folder(tmp_path):
    tiny = load("qwen2", "sdpa")
    tiny.model.save_pretrained(tmp_path)
    hfkv.set_default(tiny.model, "model", assistant_model=str(tmp_path), **ALWAYS)
    try:
        output = tiny.generate(tiny.prompt())
    finally:
        hfkv.set_default(tiny.model, None)
    assert hfkv.stats(output).acceptance_rate == 1.0
