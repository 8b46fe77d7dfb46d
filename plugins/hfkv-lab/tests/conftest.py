"""A tiny random model with a tokenizer of bytes, and a text of its own."""

from __future__ import annotations

import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer():
    tokens = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_only = Tokenizer(models.BPE(vocab=tokens | {"<s>": 256}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, bos_token="<s>")


@pytest.fixture(scope="session")
def small():
    """A model sharp enough that each cached token matters, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None,
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    yield LlamaForCausalLM(config).eval()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def words():
    """Some 12,000 characters that repeat nothing for long."""
    draw = random.Random(0)
    return " ".join("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8))) for _ in range(2000))
