"""Read a long document once, then ask several questions about it: each question starts from a copy of its cache."""

import copy
import sys
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hfkv
from hfkv.integration import cache_argument

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
# "cache" since transformers 5.24, "past_key_values" before
argument = cache_argument(model)

document = tokenizer(topics["strings"][:3000], return_tensors="pt").input_ids
cache = hfkv.make_cache("kivi", model, nbits=4)
with torch.no_grad():
    model(document, **{argument: cache})
print(f"the document: {cache.get_seq_length()} tokens in {hfkv.memory(cache).stored_bytes:,} bytes")

for question in ("\n\nIn short, a string is", "\n\nA raw string is"):
    tokens = torch.cat([document, tokenizer(question, return_tensors="pt").input_ids], dim=1)
    # a copy is as small as the cache: what is packed stays packed
    branch = copy.deepcopy(cache)
    output = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=24, do_sample=False, **{argument: branch}
    )
    print(f"{question.strip()} ... {tokenizer.decode(output[0, tokens.shape[1] :], skip_special_tokens=True).strip()}")
print(f"the document: {cache.get_seq_length()} tokens, as before")
