"""Make a smaller model: fewer layers, one KV head, pairs of layers that share; save it, load it, generate."""

import sys
import tempfile
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hfkv
from hfkv_distill.conversions import Conversion, convert

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
inputs = tokenizer(topics["strings"][:1000], return_tensors="pt")

# what is cut is decided on a text
smaller = convert(model, Conversion(drop_layers=1, kv_heads=1, share_layers=2), inputs.input_ids[:, :256], print)
with tempfile.TemporaryDirectory() as folder:
    smaller.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
with torch.no_grad():
    same = torch.equal(loaded(**inputs).logits, smaller(**inputs).logits)
print("loaded as it was saved:", same)
for what, each in {"original": model, "smaller": loaded}.items():
    output = each.generate(**inputs, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    print(f"{what}: {each.num_parameters():,} parameters, {hfkv.memory(output).stored_bytes:,} bytes of cache")
