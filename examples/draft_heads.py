"""Draft with heads on the model's last hidden state: make them, save them, load them, chains and trees."""

import sys
import tempfile

from transformers import AutoModelForCausalLM, AutoTokenizer

import hfkv
from hfkv.heads import MedusaHeads, save_heads

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
inputs = tokenizer("the the the the the the the the", return_tensors="pt")
plain = model.generate(**inputs, max_new_tokens=60, do_sample=False)

with tempfile.TemporaryDirectory() as folder:
    # untrained, each head says what the model says of the next token: right where a token repeats
    save_heads(MedusaHeads.for_model(model, num_heads=3), folder)
    chain = hfkv.assistant("medusa", model, heads=folder)
    tree = hfkv.assistant("medusa", model, heads=folder, branches=(3, 2, 1))

for assisted in (chain, tree):
    output = model.generate(**inputs, max_new_tokens=60, do_sample=False, **assisted)
    print("the same text:", output.tolist() == plain.tolist())
    print(hfkv.stats(output))
