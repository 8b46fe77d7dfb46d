"""Layers that share keys and values: what that saves, and how a model is made to compute so.

A model that was not trained to share predicts much worse. `hfkv_crosslayer.share` changes the model itself, so that
training can heal it; what is saved loads as it was changed.
"""

import sys
import tempfile
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hfkv
import hfkv_crosslayer

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
inputs = tokenizer(topics["strings"][:2000], return_tensors="pt")

packing = {"nbits": 4, "residual_length": 64}
for what, settings in {
    "plain": {},
    "shared": {"cache_implementation": "crosslayer", "cache_config": {"share": 2}},
    "shared, 4 bit": {
        "cache_implementation": "crosslayer",
        "cache_config": {"share": 2, "store": "kivi", "store_config": packing},
    },
}.items():
    output = model.generate(**inputs, max_new_tokens=2, return_dict_in_generate=True, **settings)
    print(f"{what:14} {hfkv.memory(output).stored_bytes:>11,} bytes")

# the same as a property of the model: no cache needed, gradients flow to the layers that compute
groups = [[index, index + 1] for index in range(0, model.config.num_hidden_layers - 1, 2)]
before = model.num_parameters()
hfkv_crosslayer.share(model, groups)
print(f"{before - model.num_parameters():,} parameters of projections are gone")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
text = {"input_ids": inputs.input_ids[:, :256], "labels": inputs.input_ids[:, :256]}
for step in range(3):
    loss = model(**text).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {float(loss):.3f}")
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
print("loaded:", loaded.config.hfkv)
