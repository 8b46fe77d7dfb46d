"""A fact hidden in a long text: whether it can still be read out of the cache.

Kamradt, "Needle In A Haystack", 2023. The text with the needle is read first, so it is in the cache, as packed as it
gets; the question comes in a forward of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from . import text
from .candidates import Candidate

LENGTHS = (256, 512, 1024)
DEPTHS = (0.1, 0.5, 0.9)
# tokens to answer in: five digits are at most five of them, and a space
ANSWER_TOKENS = 8

_NEEDLE = "\n\nThe secret number of the {place} is {number}.\n\n"
_QUESTION = "\n\nThe secret number of the {place} is"
_PLACES = ("harbour", "library", "station", "museum", "bakery", "garden", "theatre", "market", "bridge")


@dataclass(frozen=True)
class Needle:
    """One haystack with its needle, and the question.

    Attributes
    ----------
    length
        Tokens of the haystack.
    depth
        Where the needle is: 0 is the beginning, 1 the end.
    haystack, question
        Tokens.
    answer
        What the model has to write.
    """

    length: int
    depth: float
    haystack: list[int]
    question: list[int]
    answer: str


def needles(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[float] = DEPTHS,
    seed: int = 0,
) -> list[Needle]:
    """A needle with a number of its own for each length and depth.

    Raises
    ------
    ValueError
        The text is shorter than the longest haystack.
    """
    if max(lengths) > len(ids):
        raise ValueError(
            f"the text has {len(ids):,} tokens and the longest haystack {max(lengths):,}. Fix: longer text"
        )
    draw = random.Random(seed)
    result = []
    for length in lengths:
        for depth in depths:
            begin = draw.randrange(len(ids) - length + 1)
            place, number = _PLACES[len(result) % len(_PLACES)], str(draw.randrange(10_000, 100_000))
            hay = list(ids[begin : begin + length])
            at = round(depth * length)
            needle = text.encode(tokenizer, _NEEDLE.format(place=place, number=number))
            question = text.encode(tokenizer, _QUESTION.format(place=place))
            haystack = [*text.start(tokenizer), *hay[:at], *needle, *hay[at:]]
            result.append(Needle(length, depth, haystack, question, number))
    return result


def find(
    candidate: Candidate,
    tokenizer: PreTrainedTokenizerBase,
    cases: Sequence[Needle],
    step: Callable[[], None] = lambda: None,
) -> list[bool]:
    """For each needle, whether the model's answer begins with the number."""
    found = []
    for case in cases:
        cache = candidate.read(torch.tensor([case.haystack]))
        tokens = candidate.go_on(cache, torch.tensor([case.haystack + case.question]), ANSWER_TOKENS)
        found.append(str(tokenizer.decode(tokens)).strip().startswith(case.answer))
        step()
    return found
