"""Generate with a 4-bit KV cache; nothing is imported from hfkv."""

import sys
from pydoc_data.topics import topics

from transformers import AutoModelForCausalLM, AutoTokenizer

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
inputs = tokenizer(topics["integers"] + topics["floating"] + topics["strings"][:2000], return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=40, cache_implementation="kivi", cache_config={"nbits": 4})
print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
