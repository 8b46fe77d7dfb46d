"""What each assistant brings on a real model: acceptance, tokens per forward, predicted and measured speed-up.

    HF_HUB_OFFLINE=1 python benchmarks/speculative.py lookup        # repeat and edit prompts, and others
    HF_HUB_OFFLINE=1 python benchmarks/speculative.py drafts        # the model's own weights and caches as drafts
    HF_HUB_OFFLINE=1 python benchmarks/speculative.py halves        # an 8-bit cache that drafts from its upper half
    HF_HUB_OFFLINE=1 python benchmarks/speculative.py lengths       # predicted and measured over g = 1 to 8
    HF_HUB_OFFLINE=1 python benchmarks/speculative.py wrong         # a draft model of random weights
    HF_HUB_OFFLINE=1 python benchmarks/speculative.py limits        # long contexts, and weights in 4 bits
    HF_HUB_OFFLINE=1 python benchmarks/speculative.py identity      # every assistant on every cache
    HF_HUB_OFFLINE=1 python benchmarks/speculative.py heads --heads FOLDER        # trained heads, on free text

``benchmarks/questions.txt`` are prompts that heads may learn from; none of those that are measured here is among them:

    hfkv distill-heads smollm2 FOLDER --kind eagle --prompts benchmarks/questions.txt --minutes 20

Each study has its own defaults. Times are medians of turns: plain decoding and the assistant after one another in the
same run. The text that both give is compared; in bfloat16 two tokens that are equally likely can change places.
``--only`` and ``--prompts`` make a run shorter. ``--save`` writes a table of ``docs/benchmarks`` anew; with ``--only``
the rows are put into it.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from parts import PartTable, Run
from prompts import FREE, REPEAT, chat
from timing import machine_line, processor, software

import hfkv
from hfkv.cli.models import load_model
from hfkv.heads import load_heads
from hfkv.integration import cache_argument
from hfkv.speculation.control import expected_tokens


class Case:
    """A model, a tokenizer, and how long to decode."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model, self.tokenizer = load_model(options.model, options.dtype)
        self.model.eval()
        self.new_tokens = options.new_tokens
        self.turns = options.turns
        self.only = options.only
        self.prompts = options.prompts
        found = [load_heads(folder, self.model) for folder in options.heads]
        self.heads = {heads.kind: heads for heads in found}

    def chat(self, text: str) -> dict[str, Any]:
        """The inputs of one question."""
        return chat(self.tokenizer, text)

    def passage(self, tokens: int, start: int = 0) -> dict[str, Any]:
        """So many tokens of CPython's help."""
        text = "".join(topics[name] for name in sorted(topics))
        ids = self.tokenizer(text[: 6 * (start + tokens)], return_tensors="pt").input_ids[:, start : start + tokens]
        return {"input_ids": ids}

    def passages(self) -> list[dict[str, Any]]:
        """Places of CPython's help far from one another, 500 tokens each."""
        return [self.passage(500, start) for start in range(0, 18000, 3000)][: self.prompts]

    def batch(self) -> dict[str, Any]:
        """The same in one batch."""
        ids = torch.cat([passage["input_ids"] for passage in self.passages()])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def generate(self, inputs: dict[str, Any], **arguments: Any) -> Any:
        """Greedy, and always as many tokens: the end token does not end it."""
        return self.model.generate(
            **inputs, do_sample=False, min_new_tokens=self.new_tokens, max_new_tokens=self.new_tokens, **arguments
        )

    def wanted(self, name: str) -> bool:
        """Whether ``--only`` asks for a row."""
        return self.only in name

    def new_text(self, output: torch.Tensor) -> torch.Tensor:
        """What was decoded ``[rows, tokens]``."""
        return output[:, -self.new_tokens :]

    def choices(self, inputs: dict[str, Any], **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The plain text ``[rows, tokens]``, and the two best logits of each of its tokens ``[rows, tokens, 2]``."""
        output = self.generate(inputs, **arguments, return_dict_in_generate=True, output_scores=True)
        return self.new_text(output.sequences), torch.stack(output.scores, dim=1).float().topk(2, dim=-1).values

    def assistant(self, name: str) -> dict[str, Any]:
        """An assistant that always drafts four tokens."""
        options: dict[str, Any] = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}
        if name == "model":
            # weights of its own: they differ from the model's by what int4 loses
            draft, _ = load_model(self.options.model, self.options.dtype)
            options["assistant_model"] = hfkv.quantize_weights(draft.eval(), hfkv.WeightConfig("rtn", nbits=4))
        elif name in self.heads:
            options["heads"] = self.heads[name]
        return hfkv.assistant(name, self.model, **options)

    def compare(
        self, inputs: dict[str, Any], assisted: dict[str, Any], cache: Callable[[], dict[str, Any]] = dict
    ) -> dict[str, Any]:
        """Plain and assisted in turns, each with the keywords of a new cache."""
        times: dict[str, list[float]] = {"plain": [], "assisted": []}
        texts: dict[str, Any] = {}
        for turn in range(self.turns):
            order: list[tuple[str, dict[str, Any]]] = [("plain", {}), ("assisted", assisted)]
            for name, keywords in order if turn % 2 == 0 else reversed(order):
                arguments = {**cache(), **keywords}
                begin = time.perf_counter()
                texts[name] = self.generate(inputs, **arguments)
                times[name].append(time.perf_counter() - begin)
        arguments = cache()
        begin = time.perf_counter()
        self.model.generate(**inputs, do_sample=False, max_new_tokens=1, **arguments)
        prompt = time.perf_counter() - begin
        stats = hfkv.stats(texts["assisted"])
        plain, ours = (texts[name][0, inputs["input_ids"].shape[1] :].tolist() for name in ("plain", "assisted"))
        same = next((n for n, pair in enumerate(zip(plain, ours, strict=True)) if pair[0] != pair[1]), len(plain))
        return {
            "speedup": statistics.median(times["plain"]) / statistics.median(times["assisted"]),
            "same": same / len(plain),
            "stats": stats,
            "step": (statistics.median(times["plain"]) - prompt) / (self.new_tokens - 1),
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


def acceptance(stats: Any) -> dict[str, Any]:
    """The columns of drafts of four tokens."""
    low, high = stats.acceptance_interval or (0.0, 0.0)
    rate = stats.acceptance_rate or 0.0
    return {
        "accepted": round(100 * rate, 1),
        "interval": f"{100 * low:.1f} to {100 * high:.1f}",
        "examined": stats.examined,
        "expected": round(expected_tokens(rate, 4), 2),
    }


HEADS = ("medusa", "eagle")
ASSISTANTS = ("lookup", "model", "self-kv", "self-weights", "early-exit")
COLUMNS = {
    "what": "Draft",
    "accepted": "Accepted, %",
    "examined": "Examined tokens",
    "per_forward": "Tokens per forward",
    "interval": "95 % interval",
    "expected": "Expected tokens per forward",
    "draft_share": "Drafting, % of the time",
    "predicted": "Predicted speed-up while drafting",
    "speedup": "Speed-up, median",
    "worst": "Speed-up, least",
    "least_per_forward": "Tokens per forward there",
    "same": "Same text, %",
    "prompts": "Prompts",
    "identical": "Identical texts",
    "stored": "Bytes besides the cache",
    "gap": "Largest gap of the two best logits where texts part",
    "middle_gap": "Median of these gaps",
}


def lookup(case: Case) -> Iterator[dict[str, Any]]:
    """Prompts that ask to repeat or edit a text, and prompts that do not."""
    assisted = hfkv.assistant("lookup", case.model)
    for name, prompts in (("repeat or edit", REPEAT), ("free text", FREE)):
        if case.wanted(name):
            results = [case.compare(case.chat(prompt), assisted) for prompt in prompts[: case.prompts]]
            # what the model does not copy cannot be drafted: the least speed-up is that of such a text
            worst = min(results, key=lambda result: result["speedup"])
            yield row(name, results) | {"least_per_forward": round(worst["stats"].tokens_per_verification, 2)}


def drafts(case: Case) -> Iterator[dict[str, Any]]:
    """The model's own weights and caches in fewer bits as drafts of the full-precision model, four tokens at a time.

    The prompts are one batch: only what is accepted is of interest.
    """
    always = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        *(
            (f"cache: kivi with {backend}, {n} bit", "self-kv", {"cache_config": {"backend": backend, "nbits": n}})
            for backend, widths in (("rtn", (2, 3, 4, 8)), ("hqq", (2, 4)), ("quanto", (2, 4)))
            for n in widths
        ),
        *(
            (f"weights: rtn, {kind}", "self-weights", {"backend_options": options})
            for kind, options in (
                ("2 bit", {"nbits": 2}),
                ("3 bit", {"nbits": 3}),
                ("4 bit", {"nbits": 4}),
                ("nf4", {"quant_type": "nf4"}),
                ("8 bit", {"nbits": 8}),
            )
        ),
        ("half of the layers", "early-exit", {}),
    ]
    inputs = case.batch()
    for name, assistant, options in kinds:
        if case.wanted(name):
            assisted = hfkv.assistant(assistant, case.model, **options, **always)
            stats = hfkv.stats(case.generate(inputs, **assisted))
            yield {"what": name, **acceptance(stats)}


HALVES = {"cache_implementation": "kivi", "cache_config": {"nbits": 8, "hierarchical": True}}


def halves(case: Case) -> Iterator[dict[str, Any]]:
    """The 8-bit cache drafts for itself, from its upper halves and from a copy; what is stored for that.

    The prompts are one batch.
    """
    inputs = case.batch()

    def generate(**arguments: Any) -> tuple[Any, int]:
        output = case.generate(inputs, return_dict_in_generate=True, **arguments)
        return output, hfkv.memory(output).stored_bytes

    plain, alone = generate(**HALVES)
    always = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}
    for name, config in (("its upper halves", None), ("a copy in 4 bits", {}), ("a copy in 2 bits", {"nbits": 2})):
        if not case.wanted(name):
            continue
        output, stored = generate(**HALVES, **hfkv.assistant("self-kv", case.model, cache_config=config, **always))
        if config is not None:
            # the copy is gone by now: it holds what such a cache holds
            stored += generate(cache_implementation="kivi", cache_config=config)[1]
        stats = hfkv.stats(output)
        yield {
            "what": name,
            **acceptance(stats),
            "stored": stored - alone,
            "same": round(100 * float((output.sequences == plain.sequences).float().mean()), 1),
        }


def lengths(case: Case) -> Iterator[dict[str, Any]]:
    """Expected and counted tokens per forward, predicted and measured speed-up, over draft lengths."""
    prompts = case.passages()
    for length in range(1, 9):
        name = f"self-kv, 4 bit, g = {length}"
        if not case.wanted(name):
            continue
        always = {"num_assistant_tokens": length, "num_assistant_tokens_schedule": "constant"}
        assisted = hfkv.assistant("self-kv", case.model, **always)
        results = [case.compare(prompt, assisted) for prompt in prompts]
        found = row(name, results)
        rate = found["accepted"] / 100
        stats = [result["stats"] for result in results]
        # decoding alone: the speed-up of the whole call has the prompt in it
        step = statistics.median(result["step"] for result in results)
        rounds = sum(s.seconds for s in stats) / sum(s.verifications for s in stats)
        yield {
            "what": name,
            "accepted": found["accepted"],
            "expected": round(expected_tokens(rate, length), 2),
            "per_forward": found["per_forward"],
            "predicted": round(expected_tokens(rate, length) * step / rounds, 2),
            "speedup": round(sum(s.tokens for s in stats) * step / sum(s.seconds for s in stats), 2),
            "draft_share": found["draft_share"],
        }


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


def limits(case: Case) -> Iterator[dict[str, Any]]:
    """The model as its own draft: where its cache is long, and where its weights are what takes time."""
    long = case.passage(7500)
    name = cache_argument(case.model)
    for draft, prompt, assistant in (
        ("self-kv, after 7,500 tokens", long, "self-kv"),
        ("self-weights, after 500 tokens", case.passage(500), "self-weights"),
    ):
        if not case.wanted(draft):
            continue
        # the prompt is read once
        past = case.model.generate(**prompt, max_new_tokens=1, return_dict_in_generate=True)[name]
        past.crop(-1)
        for schedule in ("measured", "constant"):
            assisted = hfkv.assistant(
                assistant, case.model, num_assistant_tokens=4, num_assistant_tokens_schedule=schedule
            )
            result = case.compare(prompt, assisted, lambda past=past: {name: copy.deepcopy(past)})
            found = row(f"{draft}, {schedule}", [result])
            yield {key: found[key] for key in ("what", "accepted", "examined", "per_forward", "draft_share", "speedup")}


def heads(case: Case) -> Iterator[dict[str, Any]]:
    """Trained heads on prompts whose answers cannot be copied: chains as long as they pay, and trees."""
    if not case.heads:
        raise SystemExit("heads needs --heads FOLDER, which hfkv distill-heads writes")
    trees = (None, (2, 1), (3, 2, 1), (4, 3, 2, 1))
    for (kind, trained), branches in itertools.product(case.heads.items(), trees):
        name = f"{kind}, {'a chain' if branches is None else f'a tree of {branches}'}"
        if case.wanted(name):
            # a tree is as deep as it has branches, and is drafted whether it pays or not
            schedule = {} if branches is None else {"num_assistant_tokens_schedule": "constant"}
            assisted = hfkv.assistant(kind, case.model, heads=trained, branches=branches, **schedule)
            yield row(name, [case.compare(case.chat(prompt), assisted) for prompt in FREE[: case.prompts]])


def identity(case: Case) -> Iterator[dict[str, Any]]:
    """Greedy text of every assistant on every cache, against the same cache without one.

    Where they part, the plain text's two best logits say how near to a tie the model was.
    """
    caches: dict[str, dict[str, Any]] = {
        "plain": {},
        "kivi, 8 bit": {"cache_implementation": "kivi", "cache_config": {"nbits": 8, "residual_length": 32}},
        "sink": {"cache_implementation": "sink", "cache_config": {"window_length": 64}},
    }
    each = [case.passage(64, 120 * place)["input_ids"] for place in range(min(50, case.prompts))]
    prompts = [
        {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
        for rows in torch.cat(each).split(case.options.rows)
    ]
    for cache, arguments in caches.items():
        plain: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name in (*ASSISTANTS, *case.heads):
            if not case.wanted(f"{name} on {cache}"):
                continue
            plain = plain or [case.choices(prompt, **arguments) for prompt in prompts]
            assisted = case.assistant(name)
            texts = [case.generate(prompt, **arguments, **assisted) for prompt in prompts]
            apart = [
                parting(*row)
                for text, expected in zip(texts, plain, strict=True)
                for row in zip(case.new_text(text), *expected, strict=True)
            ]
            gaps = [gap for gap in apart if gap is not None]
            stats = [hfkv.stats(text) for text in texts]
            examined = sum(s.examined for s in stats)
            yield {
                "what": f"{name} on {cache}",
                "prompts": len(each),
                "identical": len(each) - len(gaps),
                "gap": round(max(gaps), 6) if gaps else "-",
                "middle_gap": round(statistics.median(gaps), 6) if gaps else "-",
                "accepted": round(100 * sum(s.accepted for s in stats) / examined, 1) if examined else "-",
                "examined": examined,
            }


def parting(text: torch.Tensor, plain: torch.Tensor, best: torch.Tensor) -> float | None:
    """By how much the plain text preferred its token where the other text first differs; None where none does.

    ``best`` are the plain text's two best logits at each place ``[tokens, 2]``.
    """
    places = (text != plain).nonzero()
    return float(best[places[0, 0], 0] - best[places[0, 0], 1]) if len(places) else None


# what a study runs with where the command line does not say
DEFAULTS: dict[str, dict[str, Any]] = {
    "lookup": {"dtype": "bfloat16", "new_tokens": 128, "prompts": 10, "turns": 1},
    "drafts": {"dtype": "float32", "new_tokens": 64, "prompts": 6},
    "halves": {"dtype": "float32", "new_tokens": 64, "prompts": 4},
    "lengths": {"dtype": "bfloat16", "new_tokens": 64, "prompts": 3, "turns": 1},
    "wrong": {"dtype": "bfloat16", "new_tokens": 256, "prompts": 3, "turns": 1},
    "limits": {"dtype": "bfloat16", "new_tokens": 64, "turns": 3},
    "heads": {"dtype": "bfloat16", "new_tokens": 128, "prompts": 10, "turns": 1},
    "identity": {"dtype": "float32", "new_tokens": 40, "prompts": 50, "rows": 10},
}
TIMED = (
    "In {dtype}, greedy, {new_tokens} new tokens; each prompt is decoded plainly and with the assistant in turns. "
    "Accepted are of the examined tokens: up to and with the first rejected one of a draft. The speed-up is of the "
    "whole call, the prompt included."
)
TITLES = {
    "lookup": ("Speculation with lookup", TIMED),
    "drafts": (
        "Weights and caches in fewer bits as drafts",
        "Four tokens at a time, always, after 500 tokens of CPython's help, {prompts} places in one batch, "
        "{new_tokens} new tokens in {dtype}. Accepted are of the examined tokens: up to and with the first rejected "
        "one of a draft.",
    ),
    "halves": (
        "An 8-bit cache that drafts for itself",
        "Four tokens at a time, always, after 500 tokens, {prompts} places in one batch, {new_tokens} new tokens in "
        "{dtype}; the target is kivi in 8 bits, hierarchical. Accepted are of the examined tokens: up to and with the "
        "first rejected one of a draft.",
    ),
    "lengths": (
        "Draft lengths: predicted and measured",
        "The model drafts g tokens from its own cache in 4 bits, always, after 500 tokens at {prompts} places, "
        "{new_tokens} new tokens in {dtype}. Expected is (1 - a^(g+1)) / (1 - a) with the row's own acceptance a; the "
        "predicted speed-up is that times a plain step by a round, the measured one counts the tokens. Both leave the "
        "prompt out.",
    ),
    "limits": (
        "The model as its own draft",
        f"Four drafts at most, as many as pay (measured) or always (constant). The prompt was read before. {TIMED}",
    ),
    "wrong": ("A draft model of random weights", TIMED),
    "heads": (
        "Trained heads on free text",
        f"The heads learned from the model's own answers to other prompts. {TIMED} A tree's numbers are how many "
        "tokens follow each one, by depth.",
    ),
    "identity": (
        "Greedy identity with assistants in {dtype}",
        "{new_tokens} tokens after 64 of prompt in {dtype}, with four drafts always, in batches of {rows}, against the "
        "same cache without an assistant. The copy that self-kv drafts from packs nothing yet at this length. Where "
        "two texts part, the gap is by how much the plain one preferred its token, in logits. Heads were trained for a "
        "few minutes (`hfkv distill-heads`); any would do.",
    ),
}
STUDIES: dict[str, Callable[[Case], Iterator[dict[str, Any]]]] = {
    "lookup": lookup,
    "drafts": drafts,
    "halves": halves,
    "lengths": lengths,
    "wrong": wrong,
    "limits": limits,
    "heads": heads,
    "identity": identity,
}


class Saved:
    """A table of the docs, that rows are put into as they are found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        # what the figures depend on, where it is not what the command would do by itself
        self.given = {name: getattr(options, name) for name in DEFAULTS[options.study]}
        versions = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
        timed = "turns" in self.given
        if timed:
            self.given["OMP_NUM_THREADS"] = torch.get_num_threads()
        machine = machine_line() if timed else f"{processor()}; {software()}"
        self.run = Run(options.study, machine, versions, self.given)
        self.table: PartTable | None = None

    def put(self, found: dict[str, Any]) -> None:
        """Write a row."""
        options, given = self.options, self.given
        if self.table is None:
            if not options.only:
                options.save.unlink(missing_ok=True)
            self.table = PartTable(options.save, "what", {key: COLUMNS[key] for key in found}, ())
        self.table.check(self.run, [found["what"]])
        self.table.put(self.run, found["what"], found)
        title, about = TITLES[options.study]
        self.table.save(
            title=f"{title.format(**given)} on {options.model}",
            plugins=["speculative"],
            about=f"{about.format(**given)} {self.table.machines()}",
            command=self.command(self.table.names),
        )

    def command(self, names: list[str]) -> str:
        """What measures the whole table at once."""
        options, given = self.options, dict(self.given)
        threads = f" OMP_NUM_THREADS={given.pop('OMP_NUM_THREADS')}" if "turns" in given else ""
        result = f"HF_HUB_OFFLINE=1{threads} python benchmarks/speculative.py {options.study}"
        result += f" --model {options.model}" if options.model != "smollm2" else ""
        for name, value in given.items():
            result += f" --{name.replace('_', '-')} {value}" if value != DEFAULTS[options.study][name] else ""
        kinds = dict.fromkeys(name.split()[0].rstrip(",") for name in names)
        return result + "".join(f" --heads {kind}" for kind in kinds if kind in HEADS)


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m, an ID or a folder")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--turns", type=int, help="timings of each prompt, for studies that measure time")
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--prompts", type=int, help="at most so many prompts a row")
    parser.add_argument("--rows", type=int, help="identity: prompts that are decoded as one batch")
    parser.add_argument(
        "--heads", type=Path, metavar="FOLDER", action="append", default=[], help="for heads and identity; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--save", type=Path, help="write the table to this file; with --only, into that of this file")
    options = parser.parse_args(given)
    defaults = DEFAULTS[options.study]
    for name in ("dtype", "new_tokens", "turns", "prompts", "rows"):
        if name not in defaults and getattr(options, name) is not None:
            parser.error(f"{options.study} has no --{name.replace('_', '-')}")
        if getattr(options, name) is None:
            setattr(options, name, defaults.get(name))
    return options


def main(given: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    options = parsed(given)
    case = Case(options)
    saved = Saved(options)
    case.generate(case.passage(8))
    for found in STUDIES[options.study](case):
        if options.save:
            saved.put(found)
        if options.json:
            print(json.dumps(found), flush=True)
        else:
            print(", ".join(f"{COLUMNS[key]}: {value}" for key, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
