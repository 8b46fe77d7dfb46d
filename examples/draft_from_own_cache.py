"""A long prompt's 8-bit cache drafts for itself: from the upper 4 bits of its codes, with no copy."""

import sys
from pydoc_data.topics import topics

from transformers import AutoModelForCausalLM, AutoTokenizer

import hfkv

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
inputs = tokenizer(topics["strings"][:3000], return_tensors="pt")

asked = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
asked |= {"cache_implementation": "kivi", "cache_config": {"nbits": 8, "hierarchical": True}}
plain = model.generate(**inputs, **asked)
output = model.generate(**inputs, **asked, **hfkv.assistant("self-kv", model, num_assistant_tokens_schedule="constant"))
print("the same text:", output.sequences.tolist() == plain.sequences.tolist())
print(f"stored: {hfkv.memory(plain).stored_bytes:,} bytes, with drafts {hfkv.memory(output).stored_bytes:,}")
stats = hfkv.stats(output)
print(f"accepted: {stats.accepted} of {stats.examined} examined drafts, {stats.verifications} forwards")
