"""Sixteen facts, each with four endings: whether the model finds the right one most likely.

The questions come after a long text, so that they are answered with a cache that is packed. Sixteen questions separate
little: between 12 and 13 right answers lies less than chance alone moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import Cache, PreTrainedTokenizerBase

from hfkv.cli.quality import log_probabilities

from . import text
from .candidates import Candidate, common_prefix, copied


@dataclass(frozen=True)
class Fact:
    """The beginning of a sentence and its possible endings, the right one first."""

    beginning: str
    endings: tuple[str, str, str, str]


FACTS = (
    Fact("The capital of France is", ("Paris", "Madrid", "Vienna", "Lisbon")),
    Fact("The capital of Japan is", ("Tokyo", "Beijing", "Seoul", "Bangkok")),
    Fact("Water is made of hydrogen and", ("oxygen", "carbon", "helium", "iron")),
    Fact("The chemical symbol of gold is", ("Au", "Ag", "Fe", "Cu")),
    Fact("The planet closest to the Sun is", ("Mercury", "Venus", "Mars", "Jupiter")),
    Fact("A triangle has", ("three sides", "four sides", "five sides", "six sides")),
    Fact("One hour has", ("sixty minutes", "ninety minutes", "forty minutes", "ten minutes")),
    Fact("The opposite of hot is", ("cold", "warm", "dry", "loud")),
    Fact("The largest ocean on Earth is the", ("Pacific", "Atlantic", "Indian", "Arctic")),
    Fact("Romeo and Juliet was written by William", ("Shakespeare", "Wordsworth", "Faulkner", "Blake")),
    Fact("The Moon goes around the", ("Earth", "Sun", "Mars", "Saturn")),
    Fact("Bees make", ("honey", "milk", "silk", "bread")),
    Fact("At sea level water boils at 100 degrees", ("Celsius", "Fahrenheit", "Kelvin", "north")),
    Fact("The organ that pumps blood through the body is the", ("heart", "liver", "lung", "kidney")),
    Fact("The day after Monday is", ("Tuesday", "Thursday", "Sunday", "Friday")),
    Fact("A baby cat is called a", ("kitten", "puppy", "calf", "lamb")),
)


@dataclass(frozen=True)
class Question:
    """A fact in tokens, after the text that all questions share.

    Attributes
    ----------
    beginning
        Tokens from the shared text's end to the ending.
    endings
        Tokens of each ending, the right one first.
    """

    beginning: list[int]
    endings: list[list[int]]


def questions(
    tokenizer: PreTrainedTokenizerBase, context: Sequence[int], facts: Sequence[Fact] = FACTS
) -> tuple[list[int], list[Question]]:
    """The tokens that all questions begin with, and the rest of each."""
    before = [*text.start(tokenizer), *context]
    whole = [before + text.encode(tokenizer, f"\n\n{fact.beginning}") for fact in facts]
    shared = common_prefix(whole)
    endings = [[text.encode(tokenizer, f" {ending}") for ending in fact.endings] for fact in facts]
    return whole[0][:shared], [
        Question(tokens[shared:], options) for tokens, options in zip(whole, endings, strict=True)
    ]


def answer(
    candidate: Candidate, shared: list[int], asked: Sequence[Question], step: Callable[[], None] = lambda: None
) -> list[bool]:
    """For each question, whether the right ending is the most likely one (per token)."""
    packed = candidate.read(torch.tensor([shared]))
    right = []
    for question in asked:
        scores = [_score(candidate, packed, question.beginning, ending) for ending in question.endings]
        right.append(max(range(len(scores)), key=scores.__getitem__) == 0)
        step()
    return right


def _score(candidate: Candidate, cache: Cache, beginning: list[int], ending: list[int]) -> float:
    """Mean log-probability of the ending's tokens."""
    given = torch.tensor([[*beginning, *ending[:-1]]], device=candidate.model.device)
    (predicted,) = log_probabilities(candidate.model, given, 0, copied(cache), given.shape[1])
    rows = predicted[0, len(beginning) - 1 :]
    return float(rows.gather(1, torch.tensor(ending, device=rows.device)[:, None]).mean())
