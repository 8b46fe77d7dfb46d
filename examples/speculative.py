"""Decode speculatively on a compressed cache: an edit of a text, drafted by copying from it."""

import sys
from pydoc_data.topics import topics

from transformers import AutoModelForCausalLM, AutoTokenizer

import hfkv

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
inputs = tokenizer(f"Repeat this text:\n\n{topics['integers']}\n\n", return_tensors="pt")

asked = {"max_new_tokens": 100, "do_sample": False, "cache_implementation": "kivi"}
plain = model.generate(**inputs, **asked)
output = model.generate(**inputs, **asked, **hfkv.assistant("lookup", model))
print("the same text:", output.tolist() == plain.tolist())
print(hfkv.stats(output))
