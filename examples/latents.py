"""A few latents in the cache in place of keys and values: convert, save, load, generate, and quantize them too."""

import sys
import tempfile
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hfkv
from hfkv_distill.conversions import compress_latents

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
inputs = tokenizer(topics["strings"][:1000], return_tensors="pt")

# keys of all heads, and values, with half as many numbers each; the text shows which directions matter
rank = model.model.layers[0].self_attn.k_proj.out_features // 2
narrow = compress_latents(model, rank, inputs.input_ids[:, :256])
with tempfile.TemporaryDirectory() as folder:
    narrow.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
with torch.no_grad():
    same = torch.equal(loaded(**inputs).logits, narrow(**inputs).logits)
print("loaded as it was saved:", same)
kivi = {"cache_implementation": "kivi", "cache_config": {"nbits": 4}}
for what, (each, cache) in {"original": (model, {}), "latents": (loaded, {}), "kivi": (loaded, kivi)}.items():
    output = each.generate(**inputs, max_new_tokens=2, do_sample=False, return_dict_in_generate=True, **cache)
    print(f"{what}: {hfkv.memory(output).stored_bytes:,} bytes of cache")
