"""Talk for ever in constant memory: a window over the newest tokens, with the first ones as attention sinks.

    python examples/endless_chat.py [model] [characters]

A long text is read bit by bit, as a chat would be, and the model says something every now and then. All of it goes
through one cache of 1,024 tokens.
"""

import sys
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hfkv
from hfkv.integration import cache_argument

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
characters = int(sys.argv[2]) if len(sys.argv) > 2 else 200_000
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)

cache = hfkv.make_cache("sink", model, sink_length=4, window_length=1020)
text = "\n".join(topics[topic] for topic in sorted(topics))[:characters]
tokens = tokenizer(f"<|im_start|>user\n{text}", return_tensors="pt", add_special_tokens=False).input_ids
question = tokenizer("<|im_end|>\n<|im_start|>assistant\nThis is about", return_tensors="pt").input_ids
parts = tokens.split(1000, dim=1)
asked = {len(parts) * fifth // 5 for fifth in range(1, 6)}
# every token so far; the cache remembers how many of them it has seen
history = torch.empty(1, 0, dtype=torch.long)
for number, part in enumerate(parts, start=1):
    history = torch.cat([history, part], dim=1)
    if number not in asked:
        # its name is "cache" since transformers 5.24, "past_key_values" before
        with torch.no_grad():
            model(history[:, cache.get_seq_length() :], logits_to_keep=1, **{cache_argument(model): cache})
        continue
    history = torch.cat([history, question], dim=1)
    output = model.generate(
        history,
        attention_mask=torch.ones_like(history),
        max_new_tokens=16,
        do_sample=False,
        **{cache_argument(model): cache},
    )
    answer = tokenizer.decode(output[0, history.shape[1] :], skip_special_tokens=True)
    history = output
    report = hfkv.memory(cache)
    seen, kept = report.layers[0].seen, report.layers[0].tokens
    print(f"{seen} tokens seen, {kept} kept in {report.stored_bytes:,} bytes: This is about {answer.strip()!r}")
