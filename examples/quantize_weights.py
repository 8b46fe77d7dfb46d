"""Quantize the weights of a model, save it, and load it again as any other."""

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hfkv

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
# the first layer in 8 bits, the others in 4
weights = hfkv.WeightConfig("rtn", nbits=4, group_size=64, layers={"0": {"nbits": 8}})
model = AutoModelForCausalLM.from_pretrained(name, quantization_config=weights)
print(hfkv.describe(model))
inputs = tokenizer("Quantized once, loaded anywhere.", return_tensors="pt")
with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    model.save_pretrained(folder)
    # no config and, where hfkv is installed, no import of it
    again = AutoModelForCausalLM.from_pretrained(folder)
    print("the same logits:", torch.equal(again(**inputs).logits, model(**inputs).logits))
    # weights and cache are quantized independently of one another
    output = again.generate(**inputs, max_new_tokens=8, cache_implementation="kivi", return_dict_in_generate=True)
print(f"{output.sequences.shape[1]} tokens, cache of {hfkv.memory(output).stored_bytes:,} bytes")
