"""``hfkv eval`` as a function: what a cache costs in quality, measured while decoding from it.

A single forward over a prompt shows nothing: its tokens are attended to before they are packed. So every part reads a
long text first, and measures what is decoded from the cache afterwards.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

import hfkv

from . import facts, intervals, needles, refusals, text
from .attention_error import QUERIES, LayerError, attention_errors
from .candidates import Candidate
from .decoding import Losses, decode
from .intervals import Estimate
from .parts import PARTS
from .progress import Silent, Watcher
from .recording import record


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """How much is measured.

    Attributes
    ----------
    parts
        Which of `PARTS`.
    windows
        Pieces of the text to decode.
    prefill
        Tokens of each piece that are read at once, before anything is measured.
    tokens
        Tokens of each piece that are decoded and compared.
    chunk
        Tokens of each forward while decoding.
    new_tokens
        Tokens of free greedy decoding after each prefill.
    context
        Tokens of text before each fact and each prompt.
    needle_lengths, needle_depths
        Haystacks, in tokens, and where the needle lies in each.
    seed
        Of the needles and of the bootstrap.
    """

    parts: tuple[str, ...] = tuple(PARTS)
    windows: int = 3
    prefill: int = 1024
    tokens: int = 512
    chunk: int = 16
    new_tokens: int = 48
    context: int = 512
    needle_lengths: tuple[int, ...] = needles.LENGTHS
    needle_depths: tuple[float, ...] = needles.DEPTHS
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            raise ValueError(f"parts={unknown or list(self.parts)} is not supported. Choose from: {', '.join(PARTS)}")
        for name in ("windows", "prefill", "tokens", "chunk", "new_tokens", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("needle_lengths", "needle_depths"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: name at least one")
        if not all(0 <= depth <= 1 for depth in self.needle_depths):
            raise ValueError(f"needle_depths={self.needle_depths} must lie between 0 and 1")


@dataclass
class Evaluation:
    """What was found for one candidate; None for what was not measured.

    Attributes
    ----------
    label
        The candidate's.
    bits_per_element
        Bits that the cache stores for each key and value, everything counted, after a window.
    bits_per_weight
        Bits that a quantized weight takes, scales included; None for a model that is not quantized by hfkv.
    perplexity, kl, top1
        Of the decoded tokens; divergence and agreement are to the reference.
    prefixes
        For each window, how many freely decoded tokens are those of the reference, up to the first that is not.
    layers
        The error of each layer.
    needles
        For each needle, whether it was found.
    facts
        Share of right answers.
    flips
        Share of prompts that are refused here and answered by the reference, or the other way round.
    """

    label: str
    bits_per_element: float | None = None
    bits_per_weight: float | None = None
    perplexity: Estimate | None = None
    kl: Estimate | None = None
    top1: Estimate | None = None
    prefixes: list[int] | None = None
    layers: list[LayerError] | None = None
    needles: list[bool] | None = None
    facts: Estimate | None = None
    flips: Estimate | None = None
    losses: Losses = field(default_factory=Losses, repr=False)

    @property
    def prefix(self) -> float | None:
        """The median of ``prefixes``."""
        return None if self.prefixes is None else statistics.median(self.prefixes)


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
    steps = steps or Silent()
    with torch.no_grad():
        if {"decoding", "prefix"} & set(options.parts):
            _windows(candidates, tokenizer, ids, options, results, steps)
        if "layers" in options.parts:
            _layers(candidates, tokenizer, ids, options, results, steps)
        if "needles" in options.parts:
            _needles(candidates, tokenizer, ids, options, results, steps)
        if "facts" in options.parts:
            _facts(candidates, tokenizer, ids, options, results, steps)
        if "refusals" in options.parts:
            _refusals(candidates, tokenizer, ids, options, results, steps)
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


def _windows(
    candidates: Sequence[Candidate],
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    options: EvalOptions,
    results: list[Evaluation],
    steps: Watcher,
) -> None:
    """Decode every window, given and freely."""
    length = options.prefill + options.tokens + 1
    for window in text.windows(ids, options.windows, length, text.start(tokenizer)):
        caches = []
        for candidate in candidates:
            steps.step(f"reading: {candidate.label}")
            caches.append(candidate.read(window[:, : options.prefill]))
            steps.done()
        if "prefix" in options.parts:
            written = []
            for candidate, cache in zip(candidates, caches, strict=True):
                steps.step(f"free decoding: {candidate.label}")
                given = window[:, : options.prefill + 1]
                written.append(candidate.go_on(cache, given, options.new_tokens, past_the_end=True))
                steps.done()
            for result, tokens in zip(results, written, strict=True):
                result.prefixes = [*(result.prefixes or ()), _equal(written[0], tokens)]
        if "decoding" in options.parts:
            steps.step("decoding a given text")
            found = decode(candidates, caches, window, options.prefill, options.chunk)
            steps.done(len(candidates))
            for result, losses in zip(results, found, strict=True):
                result.losses.extend(losses)
        for result, cache in zip(results, caches, strict=True):
            result.bits_per_element = hfkv.memory(cache).bits_per_element
    if "decoding" in options.parts:
        for result in results:
            _summarize(result, options.seed)


def _summarize(result: Evaluation, seed: int) -> None:
    losses = result.losses
    result.perplexity = intervals.exponential(intervals.mean(losses.nll, seed=seed))
    result.kl = intervals.mean(losses.kl, seed=seed)
    same = torch.cat(losses.same)
    result.top1 = intervals.share(int(same.sum()), len(same))


def _equal(expected: list[int], actual: list[int]) -> int:
    pairs = zip(expected, actual, strict=True)
    return next((index for index, (left, right) in enumerate(pairs) if left != right), len(expected))


def _layers(
    candidates: Sequence[Candidate],
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    options: EvalOptions,
    results: list[Evaluation],
    steps: Watcher,
) -> None:
    (window,) = text.windows(ids, 1, options.prefill + QUERIES, text.start(tokenizer))
    # each model's own keys and values: with quantized weights they are others
    recorded = {id(candidate.model): candidate.model for candidate in candidates}
    calls = {key: record(model, window, QUERIES) for key, model in recorded.items()}
    for candidate, result in zip(candidates, results, strict=True):
        steps.step(f"layers: {candidate.label}")
        result.layers = attention_errors(calls[id(candidate.model)], candidate.make_cache())
        steps.done()


def _needles(
    candidates: Sequence[Candidate],
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    options: EvalOptions,
    results: list[Evaluation],
    steps: Watcher,
) -> None:
    cases = needles.needles(tokenizer, ids, options.needle_lengths, options.needle_depths, options.seed)
    for candidate, result in zip(candidates, results, strict=True):
        steps.step(f"needles: {candidate.label}")
        result.needles = needles.find(candidate, tokenizer, cases, steps.done)


def _facts(
    candidates: Sequence[Candidate],
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    options: EvalOptions,
    results: list[Evaluation],
    steps: Watcher,
) -> None:
    shared, asked = facts.questions(tokenizer, ids[: options.context])
    for candidate, result in zip(candidates, results, strict=True):
        steps.step(f"facts: {candidate.label}")
        right = facts.answer(candidate, shared, asked, steps.done)
        result.facts = intervals.share(sum(right), len(right))


def _refusals(
    candidates: Sequence[Candidate],
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    options: EvalOptions,
    results: list[Evaluation],
    steps: Watcher,
) -> None:
    asked = refusals.prompts(tokenizer, str(tokenizer.decode(ids[: options.context])))
    refused = []
    for candidate in candidates:
        steps.step(f"prompts: {candidate.label}")
        refused.append(refusals.refuse(candidate, tokenizer, asked, steps.done))
    for result, answers in zip(results, refused, strict=True):
        flips = sum(left != right for left, right in zip(refused[0], answers, strict=True))
        result.flips = intervals.share(flips, len(asked))
