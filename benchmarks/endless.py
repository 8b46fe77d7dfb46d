"""Decoding that never ends: bytes and time per token of a windowed cache, token by token, on a tiny model.

    python benchmarks/endless.py
    python benchmarks/endless.py --cache kivi:window_length=64,group_size=16,residual_length=16

The model is a random Llama of two layers, so that the cache and what is done for it are most of the time. Each row is a
tenth of the tokens: the most bytes stored, the median and the longest time of a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from timing import Table, machine_line
from transformers import LlamaConfig, LlamaForCausalLM

import hfkv
from hfkv.cli.settings import parse_cache
from hfkv.integration import cache_argument


def tiny_model() -> LlamaForCausalLM:
    """A random Llama: 2 layers, 4 query heads and 2 KV heads of 16."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, **heads)).eval()


@torch.no_grad()
def steps(model: Any, cache: Any, count: int) -> tuple[list[float], int]:
    """Seconds of each of so many greedy steps, and the most bytes that were stored."""
    token, seconds, most = torch.zeros(1, 1, dtype=torch.long), [], 0
    for step in range(count):
        start = time.perf_counter()
        logits = model(token, **{cache_argument(model): cache}).logits
        token = logits[:, -1:].argmax(-1)
        seconds.append(time.perf_counter() - start)
        if step % 97 == 0:
            most = max(most, hfkv.memory(cache).stored_bytes)
    return seconds, most


def main() -> None:
    """Print a row per tenth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--cache", default="sink:window_length=64", metavar="NAME:OPTION=VALUE,...")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = tiny_model()
    cache = parse_cache(arguments.cache).make(model)
    # the windows fill before anything is counted
    steps(model, cache, 1_000)
    table = Table(
        {"machine": machine_line(), "cache": arguments.cache},
        [f"{'tokens':>9} {'bytes':>10} {'ms, median':>11} {'longest':>9}"],
        arguments.json,
    )
    for _ in range(10):
        seconds, most = steps(model, cache, arguments.tokens // 10)
        median, longest = 1000 * statistics.median(seconds), 1000 * max(seconds)
        row = {"tokens": cache.get_seq_length(), "bytes": most, "median_ms": median, "longest_ms": longest}
        table.add(row, f"{row['tokens']:9,} {most:10,} {median:11.3f} {longest:9.2f}")
    table.close()


if __name__ == "__main__":
    main()
