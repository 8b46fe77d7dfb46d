"""Drafts copied from the text itself.

Saxena, "Prompt Lookup Decoding", 2023; Yang et al., "Inference with Reference: Lossless Acceleration of Large Language
Models", 2023. Where the newest tokens occurred before, what followed them then is proposed. The longest match is taken,
of equally long ones the newest; texts handed over come after the text itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hfkv.cache import check_length, option
from hfkv.speculation import AssistantOptions, Block, Call, Draft, Drafter

from .copy_evidence import CopyEvidence

# occurrences of a run of min_match tokens that are compared, and how far back a match is extended
_CANDIDATES, _LONGEST_MATCH = 32, 48


@dataclass(frozen=True, kw_only=True)
class LookupOptions(AssistantOptions):
    """Options of the assistant "lookup"."""

    longest: ClassVar[int] = 16

    min_match: int = option(1, "newest tokens that must have occurred before")
    texts: Sequence[str] | Sequence[Sequence[int]] = option(
        (), "texts to copy from besides the prompt: strings (with tokenizer), or lists of token ids"
    )
    tokenizer: Any = option(None, "the model's tokenizer, for texts that are strings")

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        check_length("min_match", self.min_match, minimum=1)
        if isinstance(self.texts, str):
            raise ValueError("texts is one string: pass a list of texts")
        if self.tokenizer is None and any(isinstance(text, str) for text in self.texts):
            raise ValueError("texts are strings, and tokenizer=None: pass the model's tokenizer, or lists of token ids")


class Index:
    """Where each run of ``min_match`` tokens ends, in one growing list of tokens."""

    def __init__(self, min_match: int, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._min_match = min_match
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        first = len(self.tokens)
        self.tokens.extend(tokens)
        for end in range(max(first, self._min_match - 1), len(self.tokens)):
            self._ends.setdefault(tuple(self.tokens[end + 1 - self._min_match : end + 1]), []).append(end)

    def match(self, recent: Sequence[int]) -> tuple[int, int]:
        """The longest earlier occurrence of the end of ``recent``: its length, and the place after it."""
        best = (0, 0)
        for end in self._ends.get(tuple(recent[-self._min_match :]), [])[: -_CANDIDATES - 1 : -1]:
            if end + 1 == len(self.tokens):
                # nothing follows: the end of the text itself
                continue
            length = self._min_match
            while (
                length < min(_LONGEST_MATCH, len(recent), end + 1) and self.tokens[end - length] == recent[-1 - length]
            ):
                length += 1
            if length > best[0]:
                best = length, end + 1
        return best


class LookupDrafter(Drafter):
    """The assistant "lookup"."""

    Options = LookupOptions
    options: LookupOptions
    resources: list[Index]

    def __init__(self, call: Call, options: LookupOptions, resources: list[Index]) -> None:
        super().__init__(call, options, resources)
        self._rows: list[Index] = []
        # of each row: looked for once a token, though a round asks for it twice
        self._matches: dict[int, tuple[int, int, Index]] = {}
        self._evidence = CopyEvidence()

    @classmethod
    def prepare(cls, model: Any, options: LookupOptions) -> list[Index]:
        """Index the texts handed over, once."""
        limit = model.get_input_embeddings().num_embeddings
        found = []
        for text in options.texts:
            tokens = (
                options.tokenizer(text, add_special_tokens=False).input_ids if isinstance(text, str) else list(text)
            )
            if any(type(token) is not int or not 0 <= token < limit for token in tokens):
                raise ValueError(f"texts: token ids must be integers from 0 to {limit - 1}, the model's vocabulary")
            found.append(Index(options.min_match, tokens))
        return found

    def forecast(self, ids: torch.Tensor, known: list[int]) -> list[float]:
        """By the length of the match, as copying was right so far."""
        behind = min(known)
        joint = [1.0] * self.most
        for row, count in enumerate(known):
            # what a row knows beyond the others is certain
            ahead = count - behind
            if ahead < self.most:
                length = self._match(row, ids, count)[0]
                chances = [1.0] * ahead + self._evidence.chances(length, self.most - ahead)
                joint = [one * other for one, other in zip(joint, chances, strict=True)]
        return joint

    def propose(self, block: Block) -> Draft:
        """Copy what followed the longest match."""
        lengths = []
        for row, known in enumerate(block.known):
            room = block.room(row)
            copied = self._copy(row, self._match(row, block.ids, known), room) if room else []
            block.ids[row, known : known + len(copied)] = block.ids.new_tensor(copied)
            lengths.append(len(copied))
        return Draft(lengths)

    def _match(self, row: int, ids: torch.Tensor, known: int) -> tuple[int, int, Index]:
        """A row's longest match, the place after it, and the text that it is in."""
        self._rows = self._rows or [Index(self.options.min_match) for _ in ids]
        own = self._rows[row]
        if not own.tokens:
            own.extend(ids[row, :known].tolist())
            self._matches[row] = self._longest(own)
        for token in ids[row, len(own.tokens) : known].tolist():
            # whether a copy would have been right, drafted or not
            length, place, source = self._matches[row]
            if length:
                self._evidence.learn(length, source.tokens[place] == token)
            own.extend([token])
            self._matches[row] = self._longest(own)
        return self._matches[row]

    def _longest(self, own: Index) -> tuple[int, int, Index]:
        recent = own.tokens[-_LONGEST_MATCH:]
        found = (*own.match(recent), own)
        for index in self.resources:
            other = (*index.match(recent), index)
            found = other if other[0] > found[0] else found
        return found

    def _copy(self, row: int, match: tuple[int, int, Index], count: int) -> list[int]:
        length, start, source = match
        if length == 0:
            return []
        copied = source.tokens[start : start + count]
        # a match that reaches the end of the text repeats itself
        period = copied if source is self._rows[row] else []
        while period and len(copied) < count:
            copied = (copied + period)[:count]
        return copied
