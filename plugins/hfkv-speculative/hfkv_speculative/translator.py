"""Drafts of a model with another tokenizer: the text goes to it, and what it adds comes back.

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies",
2025 (string-level exact match).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from hfkv import decoding
from hfkv.speculation import Block, Draft

# how much of the end of a text is tokenized again: what comes before no longer changes how its end is cut
_TAIL = 24


class Translator:
    """Drafts for the rows of a batch, one after another, each with a cache of its own.

    Parameters
    ----------
    model
        The model that drafts, greedily: what it says in its own tokens has no probabilities in the target's.
    tokenizer, assistant_tokenizer
        The target's and the model's own.
    """

    def __init__(self, model: Any, tokenizer: Any, assistant_tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.assistant_tokenizer = assistant_tokenizer
        self.cache_argument = decoding.cache_argument(model)
        # of each row: the model's cache, and the ids that are in it
        self._rows: list[tuple[Any, list[int]]] = []

    def propose(self, block: Block) -> Draft:
        """Write drafts into ``block.ids``."""
        self._rows = self._rows or [(decoding.draft_cache(self.model), []) for _ in block.known]
        lengths = []
        for row, known in enumerate(block.known):
            room = block.room(row)
            drafted = self._drafted(row, self._text(block, row), room) if room else []
            block.ids[row, known : known + len(drafted)] = block.ids.new_tensor(drafted)
            lengths.append(len(drafted))
        return Draft(lengths)

    @staticmethod
    def _text(block: Block, row: int) -> list[int]:
        """A row's known tokens, without the padding on its left."""
        ids: list[int] = block.ids[row, : block.known[row]].tolist()
        mask = block.kwargs.get("attention_mask")
        return ids if mask is None else ids[int((mask[row, -block.cached - 1 :] == 0).sum()) :]

    def _drafted(self, row: int, ids: list[int], room: int) -> list[int]:
        tokenizer, other = self.tokenizer, self.assistant_tokenizer
        theirs = other(tokenizer.decode(ids), add_special_tokens=False).input_ids
        if not theirs:
            return []
        tail = ids[-_TAIL:]
        text = tokenizer.decode(tail) + other.decode(self._continue(row, theirs, room))
        again: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        # cut differently where the two texts meet: nothing can be proposed
        return again[len(tail) :][:room] if again[: len(tail)] == tail else []

    def _continue(self, row: int, ids: list[int], count: int) -> list[int]:
        cache, seen = self._rows[row]
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(seen, ids, strict=False)))
        # one token at least is given: its logits start the draft
        same = min(same, len(ids) - 1)
        if seen:
            cache.crop(same - len(seen))
        drafted: list[int] = []
        given = ids[same:]
        while len(drafted) < count:
            inputs = {
                "input_ids": torch.tensor([given], device=self.model.device),
                self.cache_argument: cache,
                "return_dict": True,
            }
            logits = self.model(**inputs, **decoding.last_logits(self.model)).logits
            decoding.record_past(cache)
            given = [int(logits[0, -1].argmax())]
            drafted += given
        self._rows[row] = cache, ids + drafted[:-1]
        return drafted
