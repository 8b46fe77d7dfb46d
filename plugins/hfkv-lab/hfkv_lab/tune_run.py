"""``hfkv tune`` as a function: measures, searches, checks, compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfkv import __version__
from hfkv.cli.settings import Setting

from .progress import Silent, Watcher
from .scoring import Score, Scorer
from .tune import Budget, Candidate, Tuner
from .tune_goal import Effort, Goal
from .tune_page import Row, Tuned, row
from .tune_space import WIDTHS, LayerChoice, Sizes, Space
from .tune_state import State
from .tune_text import samples

# tokens of each forward while decoding, as of hfkv eval and hfkv demo
CHUNK = 16
# scores a cache and its options
Scores = Callable[[str, Mapping[str, Any]], Score]


def tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    content: str,
    goal: Goal,
    *,
    space: Space | None = None,
    effort: Effort | None = None,
    name: str = "the model",
    state_file: Path | None = None,
    fresh: bool = False,
    steps: Watcher | None = None,
) -> Tuned:
    """Find the settings of each layer that reach a goal.

    Parameters
    ----------
    content
        The text to measure on.
    space
        What may be chosen; by default kivi's bits, group sizes and residual length.
    state_file
        Keeps every measurement, so that an interrupted tuning goes on where it was; ``fresh`` forgets them.
    steps
        Told what is being measured.

    Raises
    ------
    ValueError
        Nothing reaches the goal, or the text is too short.
    """
    space, effort, steps = space or Space(Setting("kivi")), effort or Effort(), steps or Silent()
    space.check()
    texts = samples(model, tokenizer, content, {"learn": effort.learn, "search": effort.search, "check": effort.check})
    config = model.config.get_text_config(decoder=True)
    sizes = Sizes(config, space, effort.context, getattr(torch, effort.counted).itemsize)
    about = {
        "model": name,
        "dtype": str(model.dtype),
        "texts": [sample.key for sample in texts.values()],
        "hfkv": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    if fresh and state_file is not None:
        state_file.unlink(missing_ok=True)
    state = State(state_file, about)
    scores: dict[str, Scores] = {}
    for sample in texts.values():
        steps.step(f"reading the {sample.name} text with the plain cache")
        scores[sample.name] = _kept(state, sample.name, Scorer(model, sample.input_ids, sample.prefill, CHUNK))
    like = None if goal.like is None else scores["search"](goal.like.name, goal.like.options)
    limit = like.kl if like is not None else goal.limit or 0.0
    technique = space.cache.name

    def step(text: str | None) -> None:
        if text is None:
            steps.done()
        else:
            steps.step(text)

    tuner = Tuner(
        space,
        sizes,
        lambda options: scores["learn"](technique, options).kl,
        lambda options: within(scores["search"](technique, options), effort.confidence, like),
        step,
    )
    steps.expect(tuner.measurements + 3 * len(list(space.shared())) + 1 + len(WIDTHS))
    tuner.learn()
    candidates = tuner.search(Budget(goal.kind, limit))
    if not candidates:
        raise ValueError(_impossible(goal, effort, limit, space, scores["search"], like))
    best = candidates[0]
    return Tuned(
        model=name,
        cache_implementation=technique,
        cache_config=tuner.options(best),
        budget=goal.text,
        kind=goal.kind,
        limit=goal.limit,
        context=effort.context,
        shared=best.shared,
        layers=best.choices,
        rows=_compare(tuner, best, goal, scores["check"], step),
        sensitivities=tuple(tuner.sensitivities),
        texts={sample.name: sample.described for sample in texts.values()},
        resumed=state.resumed,
    )


def within(score: Score, confidence: float, like: Score | None) -> float:
    """What of a score is held against the limit: the upper end of a one-sided interval.

    Parameters
    ----------
    like
        The score of the cache whose divergence is the limit: compared with it, the difference alone is uncertain.
    """
    level = 2 * confidence - 1
    return score.interval(level).high if like is None else like.kl + score.minus(like, level).high


def _kept(state: State, text: str, scorer: Scorer) -> Scores:
    def score(name: str, options: Mapping[str, Any]) -> Score:
        return state.score(text, {"cache": name, **options}, lambda: scorer.score(name, options))

    return score


def _compare(
    tuner: Tuner, best: Candidate, goal: Goal, score: Scores, step: Callable[[str | None], None]
) -> tuple[Row, ...]:
    """The result, the cache that it had to be like, and uniform settings, on a text that nothing was chosen by."""
    space, sizes, name = tuner.space, tuner.sizes, tuner.space.cache.name
    step("checking the result")
    ours = score(name, tuner.options(best))
    rows = [row("tuned", (sizes.total(best.shared, best.choices), best.bits), ours)]
    step(None)
    if goal.like is not None:
        its = score(goal.like.name, goal.like.options)
        rows.append(row(goal.like.label, sizes.of_cache(goal.like), its, ours))
    first = space.group_sizes[0]
    for nbits in WIDTHS:
        step(f"checking {nbits} bits everywhere")
        same = {index: LayerChoice(nbits, nbits, first) for index in sizes.layers}
        label = f"{nbits} bits, groups of {first}, residual {space.start.residual_length}"
        size = sizes.total(space.start, same), sizes.bits(space.start, same)
        found = score(name, space.options(space.start, same[sizes.layers[0]]))
        rows.append(row(label, size, found, ours))
        step(None)
    return tuple(rows)


def _impossible(goal: Goal, effort: Effort, limit: float, space: Space, score: Scores, like: Score | None) -> str:
    if goal.kind == "bits":
        return (
            f"--budget {goal.text}: no setting has so few bits at {effort.context:,} tokens. "
            "Fix: a larger budget, or a longer --context"
        )
    widest = LayerChoice(WIDTHS[-1], WIDTHS[-1], space.group_sizes[0])
    best = within(score(space.cache.name, space.options(space.start, widest)), effort.confidence, like)
    return (
        f"--budget {goal.text}: nothing has a divergence of at most {limit:.2g}; {WIDTHS[-1]} bits everywhere have "
        f"{best:.2g}. Fix: a larger budget"
    )
