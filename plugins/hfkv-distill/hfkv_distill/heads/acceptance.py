"""How many tokens each forward of the model would give, were it to decode with the heads: greedy, in a chain.

Nothing is decoded: the model's own greedy continuation is known, and so is what the heads would have drafted at each
place. A chain goes as decoding would: it starts where the last one ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hfkv.heads import DraftHeads, EagleHead, MedusaHeads
from hfkv.heads.eagle import shift

from ..conversions.decoder import evaluating

# tokens that an EAGLE head drafts before the model looks; Medusa heads draft one each
EAGLE_DRAFT = 4


@dataclass(frozen=True)
class Continuations:
    """What the model says greedily after some prompts.

    Attributes
    ----------
    ids
        ``[rows, tokens]``, prompts and continuations.
    states
        ``[rows, tokens, hidden]``: the model's last hidden states of them.
    prompt
        Tokens of each prompt.
    """

    ids: torch.Tensor
    states: torch.Tensor
    prompt: int


def continuations(model: Any, prompts: torch.Tensor, new_tokens: int) -> Continuations:
    """Decode ``[rows, tokens]`` greedily, once; the end of text is not chosen."""
    with evaluating(model):
        ids = model.generate(
            prompts.to(model.device),
            attention_mask=torch.ones_like(prompts).to(model.device),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
        )
        states = model.base_model(ids, use_cache=False).last_hidden_state
    return Continuations(ids, states, prompts.shape[1])


def accepted_per_verification(heads: DraftHeads, model: Any, known: Continuations) -> float:
    """New tokens per forward of the model, over all rows: 1 without any draft that is right."""
    with evaluating(heads):  # type: ignore[arg-type]
        assert isinstance(heads, MedusaHeads | EagleHead)
        count = _medusa(heads, model, known) if isinstance(heads, MedusaHeads) else _eagle(heads, model, known)
        tokens = forwards = 0
        rows, length = known.ids.shape
        for row in range(rows):
            # the forward that has read the token before gives this one, and the hidden state to draft from
            place = known.prompt - 1
            while place + 1 < length - 1:
                gained = min(count(row, place), length - 2 - place - 1) + 1
                place += gained
                tokens += gained
                forwards += 1
    return tokens / forwards


def _medusa(heads: MedusaHeads, model: Any, known: Continuations) -> Callable[[int, int], int]:
    output = heads.draft_output(model)

    def drafted(index: int, row: torch.Tensor) -> torch.Tensor:
        return heads.head(index, row.float(), lambda states: output(states.to(model.dtype))).argmax(-1)

    drafts = [torch.stack([drafted(index, row) for row in known.states]) for index in range(heads.config.num_heads)]

    def count(row: int, place: int) -> int:
        right = 0
        for index, draft in enumerate(drafts):
            later = place + 2 + index
            if later >= known.ids.shape[1] or draft[row, place] != known.ids[row, later]:
                break
            right += 1
        return right

    return count


def _eagle(head: EagleHead, model: Any, known: Continuations) -> Callable[[int, int], int]:
    output, embed = head.draft_output(model), model.get_input_embeddings()

    def count(row: int, place: int) -> int:
        ids, states = known.ids[row], known.states[row, : place + 1].float()
        for right in range(EAGLE_DRAFT):
            end = place + 2 + right
            if end >= len(ids):
                return right
            # a draft that was right so far is the text: its tokens are known, its hidden states are the head's own
            embeddings = embed(ids[None, :end]).float()
            predicted = head(embeddings, shift(states[None]), use_cache=False)[0, -1:]
            if output(predicted.to(model.dtype)).argmax(-1) != ids[end]:
                return right
            states = torch.cat([states, predicted])
        return EAGLE_DRAFT

    return count
