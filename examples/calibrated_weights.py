"""Weights in 3 bits, rounded as they are and scaled for a text first: ``python calibrated_weights.py``."""

from __future__ import annotations

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hfkv


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=2,
        initializer_range=0.1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    # as in trained models: a few features are far larger than the others
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[:4] *= 20
            layer.post_attention_layernorm.weight[4:8] *= 20
    text, other = torch.randint(1, 96, (8, 128)), torch.randint(1, 96, (4, 128))
    grid = {"nbits": 3, "group_size": 64, "symmetric": False}
    for weights in (
        hfkv.WeightConfig("rtn", **grid),
        # with a real model, no ids: it reads Python's own help with the model's tokenizer, or calibration_text="..."
        hfkv.WeightConfig("awq", **grid, calibration_ids=text),
    ):
        quantized = hfkv.quantize_weights(copy.deepcopy(model), weights)
        with torch.no_grad():
            expected, actual = (each(other).logits.log_softmax(-1) for each in (model, quantized))
        divergence = (expected.exp() * (expected - actual)).sum(-1).mean()
        bits = hfkv.describe(quantized).bits_per_weight
        print(f"{weights.backend}: {bits:.2f} bits per weight, divergence {divergence:.3f}")


if __name__ == "__main__":
    main()
