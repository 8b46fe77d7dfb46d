"""Talk for ever in constant memory: a window over the newest tokens, with the first ones as attention sinks.

    python examples/endless_chat.py [model] [--characters 200000]

A long text is read bit by bit, as a chat would be, and the model says something every now and then. All of it goes
through one cache of 1,024 tokens: the bytes stay the same, and so do the time of a token and the perplexity.
"""

import argparse
import math
import statistics
import time
from pydoc_data.topics import topics

import torch
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer

import hfkv
from hfkv.cli.models import load_model
from hfkv.integration import cache_argument


class Clock(BaseStreamer):
    """When each new token was there."""

    def __init__(self):
        self.times = []

    def put(self, value):
        """One token more."""
        self.times.append(time.perf_counter())

    def end(self):
        """Nothing is left to do."""

    def median(self):
        """Milliseconds from one token to the next."""
        # the first two are the prompt and the token that came with it
        return 1000 * statistics.median(b - a for a, b in zip(self.times[1:], self.times[2:], strict=False))


parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--characters", type=int, default=200_000, help="how much of CPython's help is read")
arguments = parser.parse_args()
model, tokenizer = load_model(arguments.model)

cache = hfkv.make_cache("sink", model, sink_length=4, window_length=1020)
# its name is "cache" since transformers 5.24, "past_key_values" before
given = {cache_argument(model): cache}
text = "\n".join(topics[topic] for topic in sorted(topics))[: arguments.characters]
tokens = tokenizer(f"<|im_start|>user\n{text}", return_tensors="pt", add_special_tokens=False).input_ids
question = tokenizer("<|im_end|>\n<|im_start|>assistant\nThis is about", return_tensors="pt").input_ids

parts = tokens.split(1000, dim=1)
# after 2,000 tokens, after each 10,000, and at the end
asked = {2, *range(10, len(parts), 10), len(parts)}
# every token so far; the cache remembers how many of them it has seen
history = torch.empty(1, 0, dtype=torch.long)
losses, rows = [], []
for number, part in enumerate(tqdm(parts, unit_scale=1000, unit=" tokens"), start=1):
    history = torch.cat([history, part], dim=1)
    new = history[:, cache.get_seq_length() :]
    with torch.no_grad():
        logits = model(new, **given).logits[0, :-1]
    losses.append(float(torch.nn.functional.cross_entropy(logits, new[0, 1:])))
    if number not in asked:
        continue
    history, clock = torch.cat([history, question], dim=1), Clock()
    output = model.generate(
        history, attention_mask=torch.ones_like(history), max_new_tokens=32, do_sample=False, streamer=clock, **given
    )
    answer = " ".join(tokenizer.decode(output[0, history.shape[1] :], skip_special_tokens=True).split())
    history = output
    report = hfkv.memory(cache)
    seen, kept = report.layers[0].seen, report.layers[0].tokens
    rows.append((report.stored_bytes, clock.median()))
    perplexity = math.exp(statistics.mean(losses))
    losses = []
    tqdm.write(
        f"{seen} tokens seen, {kept} kept in {report.stored_bytes:,} bytes, {rows[-1][1]:.1f} ms per token, perplexity "
        f"since the last line {perplexity:.1f}: This is about {answer!r}"
    )
memory, duration = (last / first for first, last in zip(rows[0], rows[-1], strict=True))
print(f"from first to last line: memory x {memory:.2f}, time per token x {duration:.2f}")
