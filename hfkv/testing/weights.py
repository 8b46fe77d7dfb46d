"""What the contracts of weight quantizers are run on."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

IDS = [[1, 7, 3, 44, 12, 30, 8, 59, 2, 21]]


def small_model(dtype: torch.dtype = torch.float32, tied: bool = True) -> PreTrainedModel:
    """A random Llama; its widths are multiples of 64, as libraries' kernels ask, and its projections have biases."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.1,
        attention_bias=True,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model.to(dtype)


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    """``[1, tokens, vocabulary]`` for a prompt, then for one token more, which takes the way of decoding."""
    ids = torch.tensor(IDS)
    prompt = model(ids, use_cache=True)
    cached = prompt.get("cache", prompt.get("past_key_values"))
    name = "cache" if "cache" in prompt else "past_key_values"
    return torch.cat([prompt.logits, model(ids[:, :1], **{name: cached}).logits], dim=1)
