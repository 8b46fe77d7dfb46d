"""What each assistant brings on a real model: acceptance, tokens per forward, predicted and measured speed-up.

    HF_HUB_OFFLINE=1 python benchmarks/speculative.py lookup        # repeat and edit prompts, and others
    HF_HUB_OFFLINE=1 python benchmarks/speculative.py drafts        # the model's own weights and caches as drafts
    HF_HUB_OFFLINE=1 python benchmarks/speculative.py lengths       # predicted and measured over g = 1 to 8
    HF_HUB_OFFLINE=1 python benchmarks/speculative.py wrong         # a draft model of random weights
    HF_HUB_OFFLINE=1 python benchmarks/speculative.py identity --dtype float32    # every assistant on every cache

Times are medians of turns: plain decoding and the assistant after one another in the same run. The text that both
give is compared; in bfloat16 two tokens that are equally likely can change places. ``--only`` and ``--prompts`` make
a run shorter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers

import hfkv
from hfkv.cli.models import load_model

NOTES = (
    "The library opens at nine on weekdays and at ten on Saturdays. Members may borrow six books for three weeks. "
    "Late books cost ten cents a day. The reading room on the second floor is quiet; talk in the hall. "
    "Bring your card when you come, and ask at the desk if you have lost it."
)
CODE = """def mean(values):
    total = 0
    for value in values:
        total = total + value
    return total / len(values)

def spread(values):
    middle = mean(values)
    total = 0
    for value in values:
        total = total + (value - middle) ** 2
    return total / len(values)
"""
REPEAT = [
    f"Repeat this text exactly:\n\n{NOTES}",
    f"Copy the following text word for word:\n\n{NOTES}",
    f"Correct the spelling in this text and write it again in full:\n\n{NOTES}",
    f"Write this text again, with 'books' changed to 'records':\n\n{NOTES}",
    f"Return this text unchanged:\n\n{topics['integers'][:700]}",
    f"Repeat this code exactly:\n\n{CODE}",
    f"Rename the function mean to average and show the whole code:\n\n{CODE}",
    f"Add a docstring to each function and show the whole code:\n\n{CODE}",
    "Repeat this list five times: apples, pears, plums, cherries, figs, dates, melons, grapes.",
    f"Quote this passage in full, then quote it again:\n\n{NOTES[:240]}",
]
FREE = [
    "Write a short story about a lighthouse keeper and a storm.",
    "Explain how a bicycle stays upright.",
    "What should I consider when I buy a used car?",
    "Describe the taste of a ripe mango to someone who has never had one.",
    "Give me ideas for a birthday party in the garden.",
    "Why is the sky blue?",
    "Write a letter to a friend who has moved to another city.",
    "Compare cats and dogs as pets.",
    "How do plants drink water?",
    "Tell me about the history of bread.",
]


class Case:
    """A model, a tokenizer, and how long to decode."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model, self.tokenizer = load_model(options.model, options.dtype)
        self.model.eval()
        self.new_tokens = options.new_tokens
        self.turns = options.turns
        self.only = options.only
        self.prompts = options.prompts

    def chat(self, text: str) -> dict[str, Any]:
        """The inputs of one question."""
        return dict(
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        )

    def passage(self, tokens: int, start: int = 0) -> dict[str, Any]:
        """So many tokens of CPython's help."""
        text = "".join(topics[name] for name in sorted(topics))
        ids = self.tokenizer(text[: 6 * (start + tokens)], return_tensors="pt").input_ids[:, start : start + tokens]
        return {"input_ids": ids}

    def generate(self, inputs: dict[str, Any], **arguments: Any) -> Any:
        """Greedy, and always as many tokens: the end token does not end it."""
        return self.model.generate(
            **inputs, do_sample=False, min_new_tokens=self.new_tokens, max_new_tokens=self.new_tokens, **arguments
        )

    def wanted(self, name: str) -> bool:
        """Whether ``--only`` asks for a row."""
        return self.only in name

    def compare(
        self, inputs: dict[str, Any], assisted: dict[str, Any], cache: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Plain and assisted in turns."""
        times: dict[str, list[float]] = {"plain": [], "assisted": []}
        texts: dict[str, Any] = {}
        for turn in range(self.turns):
            order = [("plain", cache or {}), ("assisted", {**(cache or {}), **assisted})]
            for name, arguments in order if turn % 2 == 0 else reversed(order):
                begin = time.perf_counter()
                texts[name] = self.generate(inputs, **arguments)
                times[name].append(time.perf_counter() - begin)
        stats = hfkv.stats(texts["assisted"])
        plain, ours = (texts[name][0, inputs["input_ids"].shape[1] :].tolist() for name in ("plain", "assisted"))
        same = next((n for n, pair in enumerate(zip(plain, ours, strict=True)) if pair[0] != pair[1]), len(plain))
        return {
            "speedup": statistics.median(times["plain"]) / statistics.median(times["assisted"]),
            "same": same / len(plain),
            "stats": stats,
        }


def row(name: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    """The columns of one table row, over prompts."""
    stats = [result["stats"] for result in results]
    examined, accepted = sum(s.examined for s in stats), sum(s.accepted for s in stats)
    predicted = [s.predicted_speedup for s in stats if s.predicted_speedup is not None]
    return {
        "what": name,
        "accepted": round(100 * accepted / examined, 1) if examined else "-",
        "examined": examined,
        "per_forward": round(sum(s.tokens for s in stats) / sum(s.verifications for s in stats), 2),
        "draft_share": round(100 * statistics.mean(s.draft_share for s in stats), 1),
        "predicted": round(statistics.median(predicted), 2) if predicted else "-",
        "speedup": round(statistics.median(result["speedup"] for result in results), 2),
        "worst": round(min(result["speedup"] for result in results), 2),
        "same": round(100 * statistics.mean(result["same"] for result in results), 1),
    }


COLUMNS = {
    "what": "Draft",
    "accepted": "Accepted, %",
    "examined": "Examined tokens",
    "per_forward": "Tokens per forward",
    "draft_share": "Drafting, % of the time",
    "predicted": "Predicted speed-up while drafting",
    "speedup": "Speed-up, median",
    "worst": "Speed-up, least",
    "same": "Same text, %",
}


def lookup(case: Case) -> Iterator[dict[str, Any]]:
    """Prompts that ask to repeat or edit a text, and prompts that do not."""
    assisted = hfkv.assistant("lookup", case.model)
    for name, prompts in (("repeat or edit", REPEAT), ("free text", FREE)):
        if case.wanted(name):
            yield row(name, [case.compare(case.chat(prompt), assisted) for prompt in prompts[: case.prompts]])


def drafts(case: Case) -> Iterator[dict[str, Any]]:
    """The model's own weights and caches in fewer bits as drafts of the full-precision model, four tokens at a time."""
    always = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        *(
            (f"cache: kivi, {n} bit", "self-kv", {"cache_config": {"nbits": n, "residual_length": 32}})
            for n in (2, 3, 4, 8)
        ),
        *((f"weights: rtn, {n} bit", "self-weights", {"backend_options": {"nbits": n}}) for n in (2, 3, 4, 8)),
    ]
    prompts = [case.passage(500, start) for start in (0, 3000, 6000)][: case.prompts]
    for name, assistant, options in kinds:
        if not case.wanted(name):
            continue
        assisted = hfkv.assistant(assistant, case.model, **options, **always)
        yield row(name, [case.compare(prompt, assisted) for prompt in prompts])


def lengths(case: Case) -> Iterator[dict[str, Any]]:
    """Expected and counted tokens per forward, predicted and measured speed-up, over draft lengths."""
    from hfkv.speculation.control import expected_tokens

    prompt = case.passage(500)
    for length in range(1, 9):
        assisted = hfkv.assistant(
            "self-kv", case.model, num_assistant_tokens=length, num_assistant_tokens_schedule="constant"
        )
        result = case.compare(prompt, assisted)
        found = row(f"self-kv, 4 bit, g = {length}", [result])
        rate = result["stats"].acceptance_rate or 0.0
        yield found | {"what": f"{found['what']}: expected {expected_tokens(rate, length):.2f} per forward"}


def wrong(case: Case) -> Iterator[dict[str, Any]]:
    """A draft model of random weights: what is lost until it is switched off."""
    small = transformers.LlamaConfig(
        vocab_size=case.model.config.vocab_size, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    for name, config in (("4 layers of 256", small), ("the model's own size", case.model.config)):
        if case.wanted(name):
            torch.manual_seed(0)
            draft = transformers.LlamaForCausalLM(config).to(case.model.dtype)
            assisted = hfkv.assistant("model", case.model, assistant_model=draft)
            yield row(name, [case.compare(case.chat(prompt), assisted) for prompt in FREE[: min(3, case.prompts)]])


def identity(case: Case) -> Iterator[dict[str, Any]]:
    """Greedy text of every assistant on every cache, against the same cache without one."""
    caches: dict[str, dict[str, Any]] = {
        "plain": {},
        "kivi, 8 bit": {"cache_implementation": "kivi", "cache_config": {"nbits": 8, "residual_length": 32}},
        "sink": {"cache_implementation": "sink", "cache_config": {"window_length": 64}},
    }
    always = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}
    draft, _ = load_model("smollm2", "bfloat16")
    assistants = {
        "lookup": hfkv.assistant("lookup", case.model, **always),
        "model": hfkv.assistant("model", case.model, assistant_model=draft.eval(), **always),
        **{name: hfkv.assistant(name, case.model, **always) for name in ("self-kv", "self-weights", "early-exit")},
    }
    prompts = [case.passage(96, 120 * place) for place in range(min(50, case.prompts))]
    for cache, arguments in caches.items():
        for name, assisted in assistants.items():
            if case.wanted(f"{name} on {cache}"):
                yield row(f"{name} on {cache}", [case.compare(prompt, assisted, arguments) for prompt in prompts])


STUDIES: dict[str, Callable[[Case], Iterator[dict[str, Any]]]] = {
    "lookup": lookup,
    "drafts": drafts,
    "lengths": lengths,
    "wrong": wrong,
    "identity": identity,
}


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m, an ID or a folder")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--prompts", type=int, default=50, help="at most so many prompts a row")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    options = parser.parse_args()
    case = Case(options)
    case.generate(case.chat("Hello."))
    for found in STUDIES[options.study](case):
        if options.json:
            print(json.dumps(found), flush=True)
        else:
            print(", ".join(f"{COLUMNS[key]}: {value}" for key, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
