"""What storing one token costs, attention aside, at several lengths of the context.

    OMP_NUM_THREADS=2 python benchmarks/update.py
    OMP_NUM_THREADS=2 python benchmarks/update.py --contexts 1024 8192 --json

A step stores one token in every layer of a model of SmolLM2-135M's shape. Steps are timed in runs of whole blocks, so
that each run packs as often as every other; contexts take turns.
"""

from __future__ import annotations

import argparse
import json

import torch
from timing import in_turns, machine_line
from transformers import DynamicCache, LlamaConfig

import hfkv

LAYERS, HEADS, HEAD_DIM = 30, 3, 64
CONFIG = LlamaConfig(
    num_hidden_layers=LAYERS, hidden_size=9 * HEAD_DIM, num_attention_heads=9, num_key_value_heads=HEADS
)
# steps of one timed run: two blocks of 32
STEPS = 64


def filled(name: str, context: int) -> DynamicCache:
    """A cache that holds a context of random tokens."""
    cache = DynamicCache(config=CONFIG) if name == "dynamic" else hfkv.make_cache(name, CONFIG)
    states = torch.randn(2, 1, HEADS, context, HEAD_DIM, dtype=torch.bfloat16)
    for layer in range(LAYERS):
        cache.update(states[0], states[1], layer)
    return cache


def main() -> None:
    """Print milliseconds per step for each cache and context, and their growth from the first context to the last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--caches", nargs="+", default=["kivi", "dynamic"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    token = torch.randn(2, 1, HEADS, 1, HEAD_DIM, dtype=torch.bfloat16)
    caches = {(name, context): filled(name, context) for name in arguments.caches for context in arguments.contexts}

    def run(cache: DynamicCache) -> None:
        for _ in range(STEPS):
            for layer in range(LAYERS):
                cache.update(token[0], token[1], layer)

    calls = {f"{name} {context}": lambda cache=cache: run(cache) for (name, context), cache in caches.items()}
    milliseconds = {name: 1e3 * seconds / STEPS for name, seconds in in_turns(calls, arguments.repeats).items()}
    growth = {
        name: milliseconds[f"{name} {arguments.contexts[-1]}"] / milliseconds[f"{name} {arguments.contexts[0]}"]
        for name in arguments.caches
    }
    if arguments.json:
        print(json.dumps({"machine": machine_line(), "ms_per_step": milliseconds, "growth": growth}))
        return
    print(machine_line())
    for name, value in milliseconds.items():
        print(f"{name:16} {value:7.2f} ms per step")
    for name, value in growth.items():
        print(f"{name}: {value:.2f} times from {arguments.contexts[0]} to {arguments.contexts[-1]} tokens")


if __name__ == "__main__":
    main()
