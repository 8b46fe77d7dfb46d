"""What quantized weights cost in quality, and what they bring while decoding: a real model, backend by backend.

    HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python benchmarks/weights.py
    HF_HUB_OFFLINE=1 python benchmarks/weights.py --model gemma3-270m --weights rtn:nbits=4,group_size=64 --json

KL and top 1 compare the next-token distributions with those of the model in bfloat16, over CPython's own help.
One token is timed with no context, all models in turns, with the head as it is.
"""

from __future__ import annotations

import argparse
import ast
import json
from typing import Any

import torch
from timing import in_turns, machine_line

import hfkv
from hfkv.cli.models import load_model
from hfkv.cli.prompts import long_text

WEIGHTS = [
    "rtn:nbits=8,granularity=row",
    "rtn:nbits=4,granularity=tensor",
    "rtn:nbits=4,granularity=row",
    "rtn:nbits=4,group_size=128",
    "rtn:quant_type=nf4",
    "rtn:nbits=3,group_size=64,symmetric=False",
    "hqq:nbits=4,group_size=64",
    "hqq:nbits=3,group_size=64",
    "quanto:nbits=4,group_size=64",
    "bnb:nbits=8",
    "bnb:nbits=4",
]


def config(text: str) -> hfkv.WeightConfig:
    """``NAME:option=value,...`` as a config."""
    name, _, options = text.partition(":")
    pairs = (pair.partition("=") for pair in options.split(",") if pair)
    return hfkv.WeightConfig(name, **{key: _value(value) for key, _, value in pairs})


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@torch.no_grad()
def log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """``[tokens, vocabulary]`` float32."""
    return model(ids, use_cache=False).logits[0].float().log_softmax(-1)


def decoder(model: Any) -> Any:
    """A call that computes one token, with no cache: the linear layers are nearly all of it."""
    ids = torch.ones(1, 1, dtype=torch.long)

    @torch.no_grad()
    def run() -> None:
        model(ids, use_cache=False)

    return run


def main() -> None:
    """Print a row per setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", action="append", metavar="NAME:OPTION=VALUE,...", help="repeatable")
    parser.add_argument("--start", type=int, default=2_000)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    plain, tokenizer = load_model(arguments.model, "bfloat16")
    ids = tokenizer(long_text(), return_tensors="pt", add_special_tokens=False).input_ids
    ids = ids[:, arguments.start : arguments.start + arguments.tokens]
    expected = log_probabilities(plain, ids)
    rows: list[dict[str, Any]] = []
    calls = {"plain": decoder(plain)}
    for text in arguments.weights or WEIGHTS:
        model = hfkv.quantize_weights(load_model(arguments.model, "bfloat16")[0], config(text))
        actual = log_probabilities(model, ids)
        bits = hfkv.describe(model).bits_per_weight
        kl = (expected.exp() * (expected - actual)).sum(-1).mean().item()
        same = (expected.argmax(-1) == actual.argmax(-1)).float().mean().item()
        rows.append({"weights": text, "bits": bits, "kl": kl, "top1": 100 * same})
        calls[text] = decoder(model)
    seconds = in_turns(calls, arguments.repeats)
    for row in rows:
        row["speed"] = seconds["plain"] / seconds[row["weights"]]
    if arguments.json:
        print(json.dumps({"machine": machine_line(), "rows": rows}, indent=1))
        return
    print(machine_line())
    print(f"{'weights':44} {'bits':>6} {'KL':>9} {'top 1':>7} {'tokens/s against bfloat16':>26}")
    for row in rows:
        speed = f"{row['speed']:.2f}x"
        print(f"{row['weights']:44} {row['bits']:6.3f} {row['kl']:9.5f} {row['top1']:6.1f}% {speed:>26}")


if __name__ == "__main__":
    main()
