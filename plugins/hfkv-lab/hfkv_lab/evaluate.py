"""``hfkv eval`` as a function: what a cache costs in quality, measured while decoding from it.

A single forward over a prompt shows nothing: its tokens are attended to before they are packed. So every part reads a
long text first, and measures what is decoded from the cache afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

import hfkv

from . import facts, intervals, needles, refusals, text
from .attention_error import QUERIES, attention_errors
from .candidates import Candidate
from .decoding import Losses, decode
from .evaluation import EvalOptions as EvalOptions
from .evaluation import Evaluation as Evaluation
from .progress import Silent, Watcher
from .recording import record


def evaluate(
    candidates: Sequence[Candidate],
    tokenizer: PreTrainedTokenizerBase,
    content: str,
    options: EvalOptions | None = None,
    steps: Watcher | None = None,
) -> list[Evaluation]:
    """Measure candidates against the first of them, the reference.

    Parameters
    ----------
    candidates
        The reference, as a rule the full-precision model with transformers' plain cache, then any number of others.
    content
        The text.
    steps
        Told what is being measured; it counts to `count_steps`.

    Raises
    ------
    ValueError
        The text or the model's positions are too few for the options.
    """
    options = options or EvalOptions()
    _check_positions(candidates, options)
    results = [
        Evaluation(candidate.label, bits_per_weight=hfkv.describe(candidate.model).bits_per_weight or None)
        for candidate in candidates
    ]
    ids = text.encode(tokenizer, content)
    run = _Run(list(zip(candidates, results, strict=True)), tokenizer, ids, options, steps or Silent())
    with torch.no_grad():
        for measure, parts in _MEASURES.items():
            if parts & {*options.parts}:
                measure(run)
    return results


def count_steps(options: EvalOptions, candidates: int) -> int:
    """How many steps `evaluate` takes."""
    reading = {"decoding", "prefix"} & set(options.parts)
    each = {
        "decoding": options.windows,
        "prefix": options.windows,
        "layers": 1,
        "needles": len(options.needle_lengths) * len(options.needle_depths),
        "facts": len(facts.FACTS),
        "refusals": len(refusals.PROMPTS),
    }
    return candidates * ((options.windows if reading else 0) + sum(each[part] for part in options.parts))


def _check_positions(candidates: Sequence[Candidate], options: EvalOptions) -> None:
    needed = options.prefill + options.tokens + 1
    for candidate in candidates:
        config = candidate.model.config.get_text_config(decoder=True)
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and needed > limit:
            raise ValueError(
                f"prefill={options.prefill} and tokens={options.tokens} are more than the {limit:,} tokens that the "
                f"model takes. Fix: --prefill {max(1, limit // 2)} --tokens {max(1, limit // 2 - 1)}"
            )


@dataclass(frozen=True)
class _Run:
    """An evaluation under way: the candidates with what is known of each, and what all are measured on."""

    compared: list[tuple[Candidate, Evaluation]]
    tokenizer: PreTrainedTokenizerBase
    ids: list[int]
    options: EvalOptions
    steps: Watcher

    def windows(self, count: int, length: int) -> list[torch.Tensor]:
        return text.windows(self.ids, count, length, text.start(self.tokenizer))

    def each(self, what: str) -> Iterator[tuple[Candidate, Evaluation]]:
        """The candidates in turn, each announced."""
        for candidate, result in self.compared:
            self.steps.step(f"{what}: {candidate.label}")
            yield candidate, result


def _windows(run: _Run) -> None:
    """Decode every window, given and freely."""
    options = run.options
    losses = [Losses() for _ in run.compared]
    for window in run.windows(options.windows, options.prefill + options.tokens + 1):
        caches = []
        for candidate, _ in run.each("reading"):
            caches.append(candidate.read(window[:, : options.prefill]))
            run.steps.done()
        if "prefix" in options.parts:
            written = []
            for (candidate, result), cache in zip(run.each("free decoding"), caches, strict=True):
                given = window[:, : options.prefill + 1]
                written.append(candidate.go_on(cache, given, options.new_tokens, past_the_end=True))
                result.prefixes = [*(result.prefixes or ()), _equal(written[0], written[-1])]
                run.steps.done()
        if "decoding" in options.parts:
            run.steps.step("decoding a given text")
            candidates = [candidate for candidate, _ in run.compared]
            for total, found in zip(
                losses, decode(candidates, caches, window, options.prefill, options.chunk), strict=True
            ):
                total.extend(found)
            run.steps.done(len(candidates))
        for (_, result), cache in zip(run.compared, caches, strict=True):
            result.bits_per_element = hfkv.memory(cache).bits_per_element
    if "decoding" in options.parts:
        for (_, result), loss in zip(run.compared, losses, strict=True):
            _summarize(result, loss, losses[0], options.seed)


def _summarize(result: Evaluation, losses: Losses, reference: Losses, seed: int) -> None:
    more = [mine - its for mine, its in zip(losses.nll, reference.nll, strict=True)]
    result.perplexity = intervals.exponential(intervals.mean(intervals.blocks(losses.nll), seed=seed))
    result.perplexity_ratio = intervals.exponential(intervals.mean(intervals.blocks(more), seed=seed))
    result.kl = intervals.mean(intervals.blocks(losses.kl), seed=seed)
    result.top1 = losses.agreement()


def _equal(expected: list[int], actual: list[int]) -> int:
    pairs = zip(expected, actual, strict=True)
    return next((index for index, (left, right) in enumerate(pairs) if left != right), len(expected))


def _layers(run: _Run) -> None:
    (window,) = run.windows(1, run.options.prefill + QUERIES)
    # each model's own keys and values: with quantized weights they are others
    models = {id(candidate.model): candidate.model for candidate, _ in run.compared}
    calls = {key: record(model, window, QUERIES) for key, model in models.items()}
    for candidate, result in run.each("layers"):
        result.layers = attention_errors(calls[id(candidate.model)], candidate.make_cache())
        run.steps.done()


def _needles(run: _Run) -> None:
    options = run.options
    cases = needles.needles(run.tokenizer, run.ids, options.needle_lengths, options.needle_depths, options.seed)
    for candidate, result in run.each("needles"):
        result.needles = needles.find(candidate, run.tokenizer, cases, run.steps.done)


def _facts(run: _Run) -> None:
    shared, asked = facts.questions(run.tokenizer, run.ids[: run.options.context])
    for candidate, result in run.each("facts"):
        right = facts.answer(candidate, shared, asked, run.steps.done)
        result.facts = intervals.share(sum(right), len(right))


def _refusals(run: _Run) -> None:
    context = str(run.tokenizer.decode(run.ids[: run.options.context]))
    asked = refusals.prompts(run.tokenizer, context)
    reference: list[bool] | None = None
    for candidate, result in run.each("prompts"):
        refused = refusals.refuse(candidate, run.tokenizer, asked, run.steps.done)
        reference = reference or refused
        flips = sum(left != right for left, right in zip(reference, refused, strict=True))
        result.flips = intervals.share(flips, len(asked))


# what measures which parts
_MEASURES: dict[Callable[[_Run], None], set[str]] = {
    _windows: {"decoding", "prefix"},
    _layers: {"layers"},
    _needles: {"needles"},
    _facts: {"facts"},
    _refusals: {"refusals"},
}
