"""Quantize the weights of a model, save it, and load it again as any other: ``python quantize_weights.py``."""

from __future__ import annotations

import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hfkv


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    # the first layer in 8 bits, the others in 4
    weights = hfkv.WeightConfig("rtn", nbits=4, group_size=64, layers={"0": {"nbits": 8, "symmetric": True}})
    hfkv.quantize_weights(model, weights)
    print(hfkv.describe(model))
    ids = torch.arange(1, 9)[None]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        # no config and, where hfkv is installed, no import of it
        again = AutoModelForCausalLM.from_pretrained(folder)
        print("the same logits:", torch.equal(again(ids).logits, model(ids).logits))
        # weights and cache are quantized independently of one another
        output = again.generate(
            ids, max_new_tokens=8, min_new_tokens=8, cache_implementation="kivi", return_dict_in_generate=True
        )
        print(f"{output.sequences.shape[1]} tokens, cache of {hfkv.memory(output).stored_bytes:,} bytes")


if __name__ == "__main__":
    main()
