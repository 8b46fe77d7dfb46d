"""``hfkv plan`` as a function: from a model's shapes to the page with what fits, and how fast it could be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import batching, plan_page
from .cards import Card
from .page import Figure, Page, Table
from .plan import CachePlan, Fit, fit
from .plan_model import PlanModel
from .plan_weights import WeightFormat
from .roofline import Roofline, speculation

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

# tables and figures, and what ``--json`` prints of them
Section = tuple[list[Table | Figure], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of a model.

    Attributes
    ----------
    users, context
        For how many users the longest context is, and for which context the most users.
    memories
        Bytes of the cards to fit in.
    overhead
        Bytes that are neither weights nor cache.
    card
        The card whose speed is asked for; None for none.
    batch_size
        Users of a decode step and of the batching.
    acceptance
        How often a draft token is accepted; None leaves speculative decoding out.
    draft_lengths, draft_cost
        Tokens of a draft, to compare, and a draft step's time in the model's.
    requests
        How many requests are simulated; None for none.
    answer_tokens, answer_spread
        Mean tokens of an answer, and the deviation of their logarithm.
    """

    users: int = 1
    context: int = 8192
    memories: tuple[float, ...] = (8e9, 16e9, 24e9, 80e9)
    overhead: float = 1e9
    card: Card | None = None
    batch_size: int = 1
    acceptance: float | None = None
    draft_lengths: tuple[int, ...] = tuple(range(1, 9))
    draft_cost: float = 0.1
    requests: int | None = None
    answer_tokens: float = 256
    answer_spread: float = 1.0


def plan(
    model: PlanModel, formats: Sequence[WeightFormat], caches: Sequence[CachePlan], question: Question | None = None
) -> Page:
    """What fits, over weight formats and caches; with a card in the question, also how fast it could be.

    Raises
    ------
    ValueError
        The context is more than the model takes.
    """
    question = question or Question()
    if model.limit and question.context > model.limit:
        raise ValueError(f"--context {question.context} is more than the {model.limit} tokens that {model.name} takes")
    fits = [
        fit(model, each, one, space, users=question.users, context=question.context, overhead=question.overhead)
        for each in formats
        for one in caches
        for space in question.memories
    ]
    sections = [_sizes(model, formats, caches, question), _fits(model, fits, question, caches)]
    if question.card is not None:
        rooflines = [Roofline(model, formats[0], one, question.card) for one in caches]
        sections.append(_speed(rooflines, question, question.card))
        if question.acceptance is not None:
            sections.append(_speculation(rooflines[0], question, question.acceptance))
        if question.requests:
            sections.append(_batching(rooflines[0], question, question.requests))
    facts = {
        "model": model.name,
        "parameters": f"{model.parameters.total:,}",
        "layers": f"{len(model.shapes)}, of {model.shapes[0].elements:,} numbers a token in the first",
        "full precision": f"{8 * caches[0].itemsize} bits",
    }
    extra = {key: value for _, data in sections for key, value in data.items()}
    parts = [part for shown, _ in sections for part in shown]
    return Page(f"Plan for {model.name}", facts, parts, plan_page.data(model, fits, **extra))


def _sizes(
    model: PlanModel, formats: Sequence[WeightFormat], caches: Sequence[CachePlan], question: Question
) -> Section:
    context = question.context
    return [plan_page.weights_table(model, formats), plan_page.caches_table(caches, context)], {
        "context": context,
        "users": question.users,
        "weights": {each.name: each.bytes_of(model.parameters) for each in formats},
        "caches": {
            one.setting.label: {"bytes": one.bytes(context), "bits_per_element": one.bits_per_element(context)}
            for one in caches
        },
    }


def _fits(model: PlanModel, fits: Sequence[Fit], question: Question, caches: Sequence[CachePlan]) -> Section:
    users = question.users
    notes = [
        f"Memory in GB of 10^9 bytes, of which {question.overhead / 1e9:g} GB are kept for what is neither weights nor "
        "cache.",
    ]
    if any(one.limited for one in fits):
        notes.append(f"*: the model takes no more than {model.limit:,} tokens.")
    return [
        plan_page.fits_table(
            f"Longest context for {users:,} user{'s' * (users > 1)}",
            fits,
            lambda one: f"{one.longest_context:,}{'*' * one.limited}" if one.longest_context else "-",
            notes,
        ),
        plan_page.fits_table(
            f"Most users with {question.context:,} tokens each",
            fits,
            lambda one: f"{one.most_users:,}" if one.most_users else "-",
            (),
        ),
        plan_page.growth_figure(model, caches),
    ], {}


def _speed(rooflines: Sequence[Roofline], question: Question, card: Card) -> Section:
    context, batch_size = question.context, question.batch_size
    # the first cache, and the last as the other extreme
    shown = [rooflines[0], rooflines[-1]][: len(rooflines)]
    return [
        *(plan_page.roofline_table(each, context, batch_size) for each in shown),
        plan_page.throughput_table(rooflines[0], context, BATCHES, card.memory, question.overhead),
        plan_page.throughput_figure(rooflines, context, BATCHES),
    ], {
        "roofline": {
            "card": card,
            "weights": rooflines[0].weights.name,
            "caches": {
                each.cache.setting.label: {
                    "prefill_seconds": each.prefill(context).seconds(card),
                    "decode": [_step(each, size, context) for size in sorted({*BATCHES, batch_size})],
                }
                for each in rooflines
            },
        }
    }


def _step(roofline: Roofline, batch_size: int, context: int) -> dict[str, Any]:
    return {
        "batch": batch_size,
        "seconds": roofline.step_seconds(batch_size, context),
        "tokens_per_second": roofline.tokens_per_second(batch_size, context),
        "bytes": roofline.weight_bytes + roofline.cache.bytes(context, batch_size),
    }


def _speculation(roofline: Roofline, question: Question, acceptance: float) -> Section:
    cost, size, context = question.draft_cost, question.batch_size, question.context
    rounds = [speculation(roofline, acceptance, length, cost, size, context) for length in question.draft_lengths]
    return [plan_page.speculation_table(rounds, acceptance, cost)], {
        "speculation": [
            {
                "draft_length": one.draft_length,
                "expected_tokens": one.expected_tokens,
                "cost": one.cost,
                "speedup": one.speedup,
            }
            for one in rounds
        ]
    }


def _batching(roofline: Roofline, question: Question, requests: int) -> Section:
    answers = batching.lengths(requests, question.answer_tokens, question.answer_spread)
    runs = {
        name: run(answers, question.batch_size, question.context, roofline.step_seconds)
        for name, run in (("static", batching.static), ("continuous", batching.continuous))
    }
    table = plan_page.batching_table(runs, requests, question.batch_size, question.answer_tokens)
    return [table], {"batching": runs}
