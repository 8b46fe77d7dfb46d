"""What the conformance kit builds the assistants with that need more than plain options."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hfkv.heads import EagleHead, MedusaHeads

from .plugin import ALWAYS


@torch.no_grad()
def draft_model(model: Any) -> dict[str, Any]:
    """A copy of the model that is right about as often as it is wrong; a decoder of its own beside an encoder."""
    if model.config.is_encoder_decoder:
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(
            vocab_size=model.config.vocab_size,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            pad_token_id=None,
        )
        return {"assistant_model": AutoModelForCausalLM.from_config(config), **ALWAYS}
    draft = copy.deepcopy(model)
    head = draft.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(3)
    head += 0.2 * head.std() * torch.randn(head.shape, generator=generator)
    return {"assistant_model": draft, **ALWAYS}


def medusa_heads(model: Any) -> dict[str, Any]:
    """Heads that say what the model says, a token or more too early: right where a text repeats a token."""
    if model.config.is_encoder_decoder:
        return {"heads": "none", **ALWAYS}
    return {"heads": MedusaHeads.for_model(model, num_heads=3), **ALWAYS}


@torch.no_grad()
def eagle_head(model: Any) -> dict[str, Any]:
    """A head that predicts the hidden state before, with some error of its own: right where a text repeats a token."""
    if model.config.is_encoder_decoder:
        return {"heads": "none", **ALWAYS}
    head = EagleHead.for_model(model)
    size = head.config.hidden_size
    head.join.weight.copy_(torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1))
    return {"heads": head, **ALWAYS}
