"""A tuning from the model to the page: measures, searches, checks, compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfkv import __version__
from hfkv.cli.console import working
from hfkv.cli.settings import Setting

from . import tune_page
from .page import Page
from .progress import steps
from .scoring import Score, Scorer
from .tune import Budget, Measure, Tuner
from .tune_space import WIDTHS, LayerChoice, Sizes, Space
from .tune_state import State
from .tune_text import Sample, samples


@dataclass(frozen=True)
class Plan:
    """What a tuning is asked for.

    Attributes
    ----------
    budget
        As it was written.
    kind, limit, like
        ``"kl"`` or ``"bits"``; the limit, or the cache whose divergence is the limit.
    context
        The tokens whose bytes count.
    counted
        The dtype that full precision is counted in: a model that is measured in float32 may be meant for 16 bits.
    check, learn, search
        Sizes of the texts, as `tune_text.samples` takes them.
    """

    name: str
    budget: str
    kind: str
    limit: float | None
    like: Setting | None
    context: int
    counted: str
    text: str
    check: tuple[int, int, int]
    learn: tuple[int, int, int]
    search: tuple[int, int, int]


def run(
    console: Console,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    space: Space,
    plan: Plan,
    state_file: Path | None = None,
    fresh: bool = False,
) -> Page:
    """Tune a model; the page's data is a `tune_page.Tuned`.

    Raises
    ------
    ValueError
        Nothing is within the budget.
    """
    texts = samples(model, tokenizer, plan.text, plan.check, plan.learn, plan.search)
    check, _, search = texts
    sizes = Sizes(
        model.config.get_text_config(decoder=True), space, plan.context, getattr(torch, plan.counted).itemsize
    )
    about = {
        "model": plan.name,
        "dtype": str(model.dtype),
        "cache": space.cache.name,
        "texts": [sample.key for sample in texts],
        "hfkv": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    if fresh and state_file is not None:
        state_file.unlink(missing_ok=True)
    state = State(state_file, about)
    with working(console, "reading the texts with the plain cache"):
        # of the many measurements of the search, each takes few forwards; the check's chunk is that of the demo
        scorers = {
            sample.name: Scorer(model, sample.input_ids, sample.prefill, chunk=16 if sample is check else 32)
            for sample in texts
        }
    on_check, on_learn, on_search = (_measure(state, scorers, sample, space.cache.name) for sample in texts)
    with steps(console, 1) as bar:

        def step(text: str | None) -> None:
            if text is None:
                bar.done()
            else:
                bar.step(text)

        tuner = Tuner(space, sizes, on_learn, on_search, step)
        bar.expect(tuner.measurements + 3 * len(list(space.shared())))
        tuner.learn()
        limit, limit_on_search = plan.limit or 0.0, plan.limit or 0.0
        if plan.like is not None:
            name, options = plan.like.name, plan.like.options
            limit_on_search = _measure(state, scorers, search, name)(options).kl
            limit = _measure(state, scorers, check, name)(options).kl
        settled = tuner.settle(Budget(plan.kind, limit_on_search), limit, on_check)
        if settled is None:
            raise ValueError(_impossible(plan, limit, space, on_check))
        best, score = settled
        rows = [tune_page.Row("tuned", best.bits, sizes.total(best.shared, best.choices), score)]
        for nbits in WIDTHS:
            bar.step(f"checking {nbits} bits everywhere")
            same = {index: LayerChoice(nbits, nbits, space.group_sizes[0]) for index in sizes.layers}
            options = space.options(space.start, same[sizes.layers[0]])
            rows.append(
                tune_page.Row(
                    f"{nbits} bits, groups of {space.group_sizes[0]}, residual {space.start.residual_length}",
                    sizes.bits(space.start, same),
                    sizes.total(space.start, same),
                    on_check(options),
                )
            )
    tuned = tune_page.Tuned(
        model=plan.name,
        cache_implementation=space.cache.name,
        cache_config=tuner.options(best),
        budget=plan.budget,
        context=plan.context,
        shared=best.shared,
        layers=best.choices,
        rows=tuple(rows),
        sensitivities=tuple(tuner.sensitivities),
    )
    facts = {
        "model": f"{plan.name}, {str(model.dtype).removeprefix('torch.')}, {model.device.type}",
        "budget": plan.budget if plan.like is None else f"{plan.budget}: {limit:.5f} on the text of the check",
        "bytes": f"one user at {plan.context:,} tokens, full precision counted as {plan.counted}",
        **{sample.name: sample.described for sample in texts},
        "measured": f"{state.resumed} taken over from an earlier run" if state.resumed else "all in this run",
    }
    return tune_page.page(tuned, facts)


def _measure(state: State, scorers: Mapping[str, Scorer], sample: Sample, name: str) -> Measure:
    def measure(options: dict[str, Any]) -> Score:
        named = {"cache": name, **options}
        return state.score(sample.name, named, lambda: scorers[sample.name].score(name, options))

    return measure


def _impossible(plan: Plan, limit: float, space: Space, measure: Measure) -> str:
    first = space.group_sizes[0]
    if plan.kind == "bits":
        return (
            f"--budget {plan.budget}: no setting has so few bits at {plan.context:,} tokens. "
            "Fix: a larger budget, or a longer --context"
        )
    best = measure(space.options(space.start, LayerChoice(WIDTHS[-1], WIDTHS[-1], first))).kl
    return (
        f"--budget {plan.budget}: nothing has a divergence of at most {limit:.2g}; {WIDTHS[-1]} bits everywhere have "
        f"{best:.2g}. Fix: a larger budget"
    )
