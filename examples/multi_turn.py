"""Keep one cache over the turns of a conversation: each turn computes only what is new."""

import sys
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hfkv
from hfkv.integration import cache_argument

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)

cache = hfkv.make_cache("kivi", model, nbits=4)
tokens = torch.empty(1, 0, dtype=torch.long)
for question in (f"{topics['strings'][:2500]}\n\nWhat is this about?", "What is a raw string?", "Give an example."):
    turn = tokenizer(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt").input_ids
    # generate takes all tokens so far, and computes those that the cache does not hold yet
    tokens = torch.cat([tokens, turn], dim=1)
    held = cache.get_seq_length()
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=32,
        # its name is "cache" since transformers 5.24, "past_key_values" before
        **{cache_argument(model): cache},
    )
    answer = tokenizer.decode(output[0, tokens.shape[1] :], skip_special_tokens=True)
    print(f"{question.splitlines()[-1]} {answer.strip()}")
    print(f"    {tokens.shape[1]} tokens of prompt, {held} of them from the cache")
    tokens = output
print(f"{cache.get_seq_length()} tokens in {hfkv.memory(cache).stored_bytes:,} bytes")
