"""Answers to copy from, for tests that need no model: which tokens of a prompt and its greedy answer are equal.

    HF_HUB_OFFLINE=1 python benchmarks/traces.py plugins/hfkv-speculative/tests/traces.json

The prompts are those of ``speculative.py lookup``. Tokens are numbered as they appear.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from prompts import FREE, REPEAT, chat

from hfkv.cli.models import load_model


def trace(model: Any, tokenizer: Any, question: str, new_tokens: int) -> dict[str, list[int]]:
    """The prompt and the answer."""
    inputs = chat(tokenizer, question)
    output = model.generate(**inputs, do_sample=False, min_new_tokens=new_tokens, max_new_tokens=new_tokens)
    numbers: dict[int, int] = {}
    text = [numbers.setdefault(token, len(numbers)) for token in output[0].tolist()]
    length = inputs["input_ids"].shape[1]
    return {"prompt": text[:length], "answer": text[length:]}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m, an ID or a folder")
    options = parser.parse_args()
    model, tokenizer = load_model(options.model, "bfloat16")
    model.eval()
    traces = [
        {"copied": copied, **trace(model, tokenizer, question, new_tokens)}
        for copied, questions, new_tokens in ((True, REPEAT, 128), (False, FREE, 256))
        for question in questions
    ]
    options.file.write_text("[\n" + ",\n".join(map(json.dumps, traces)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
