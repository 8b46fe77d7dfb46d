"""Weights in 3 bits, rounded as they are and scaled for a text first."""

import sys
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hfkv

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
# one text to calibrate, another one to measure
read, held_out = "\n".join(text for topic, text in topics.items() if topic != "strings"), topics["strings"]
inputs = tokenizer(held_out, return_tensors="pt", truncation=True, max_length=512)


def log_probabilities(model):
    with torch.no_grad():
        return model(**inputs).logits.log_softmax(-1)


expected = log_probabilities(AutoModelForCausalLM.from_pretrained(name))
grid = {"nbits": 3, "group_size": 64, "symmetric": False}
for weights in (
    hfkv.WeightConfig("rtn", **grid),
    # by default it reads Python's own help with the model's tokenizer
    hfkv.WeightConfig("awq", **grid, calibration_text=read, calibration_tokens=1024),
):
    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=weights)
    actual = log_probabilities(model)
    divergence = (expected.exp() * (expected - actual)).sum(-1).mean()
    bits = hfkv.describe(model).bits_per_weight
    print(f"{weights.backend}: {bits:.2f} bits per weight, divergence {divergence:.3f}")
