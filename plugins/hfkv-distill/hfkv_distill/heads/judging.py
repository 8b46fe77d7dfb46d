"""What heads are worth in decoding: the same greedy text, and how many tokens each forward of the model gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hfkv
from hfkv import registry
from hfkv.heads import load_heads
from hfkv.specs import AssistantSpec

# the assistant that needs no training
BASELINE = "lookup"
# the heads' drafts as a tree, where a forward of the model can verify one: how many tokens follow each, by depth
TREE = (4, 3, 2, 1, 1, 1)
# drafts of one length, whatever they cost: what is compared is what is right
ALWAYS = {"num_assistant_tokens_schedule": "constant"}


@dataclass(frozen=True)
class Judgement:
    """One assistant on some prompts.

    Attributes
    ----------
    assistant
        Its name.
    branches
        Of the tree that it drafts; None for a chain.
    tokens_per_verification
        New tokens per forward of the model, after the prompt.
    acceptance_rate
        The share of the examined tokens that were right; None where nothing was drafted.
    identical
        For how many prompts the text is that of plain greedy decoding.
    prompts
        How many there were.
    """

    assistant: str
    branches: tuple[int, ...] | None
    tokens_per_verification: float
    acceptance_rate: float | None
    identical: int
    prompts: int


def judge(
    model: Any, folder: Path, kind: str, prompts: torch.Tensor, new_tokens: int, step: Callable[[], None] = lambda: None
) -> list[Judgement]:
    """The heads of a folder, in a chain and in a tree, and prompt lookup: those that are installed.

    Parameters
    ----------
    prompts
        ``[prompts, tokens]``; each is decoded alone.
    step
        Called after each text.
    """
    known = registry.manager().specs(AssistantSpec)
    # Medusa heads look as far as there are heads
    tree = TREE[: getattr(load_heads(folder, model).config, "num_heads", None)]
    asked: list[tuple[str, dict[str, Any]]] = [
        (kind, {"heads": str(folder)}),
        (kind, {"heads": str(folder), "branches": tree}),
        (BASELINE, {}),
    ]
    asked = [(name, options) for name, options in asked if name in known]
    arguments = {"do_sample": False, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    plain = []
    for prompt in prompts if asked else ():
        plain.append(_generate(model, prompt, arguments))
        step()
    found = []
    for name, options in asked:
        assistant = hfkv.assistant(name, model, **options, **ALWAYS)
        same = tokens = verifications = examined = accepted = 0
        try:
            texts = []
            for prompt in prompts:
                texts.append(_generate(model, prompt, {**arguments, **assistant}))
                step()
        except NotImplementedError:
            if "branches" not in options:
                raise
            # windows, or an attention that takes no mask
            continue
        for output, expected in zip(texts, plain, strict=True):
            stats = hfkv.stats(output)
            same += int(torch.equal(output, expected))
            tokens, verifications = tokens + stats.tokens, verifications + stats.verifications
            examined, accepted = examined + stats.examined, accepted + stats.accepted
        rate = accepted / examined if examined else None
        found.append(Judgement(name, options.get("branches"), tokens / verifications, rate, same, len(prompts)))
    return found


def _generate(model: Any, prompt: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    ids = prompt[None].to(model.device)
    result: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    return result
