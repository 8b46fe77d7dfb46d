"""What heads are worth in decoding: the same greedy text, and how many tokens each forward of the model gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hfkv
from hfkv import registry
from hfkv.specs import AssistantSpec

# the assistant that needs no training
BASELINE = "lookup"
# drafts of one length, whatever they cost: what is compared is what is right
ALWAYS = {"num_assistant_tokens_schedule": "constant"}


@dataclass(frozen=True)
class Judgement:
    """One assistant on some prompts.

    Attributes
    ----------
    assistant
        Its name.
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
    tokens_per_verification: float
    acceptance_rate: float | None
    identical: int
    prompts: int


def judge(
    model: Any, folder: Path, kind: str, prompts: torch.Tensor, new_tokens: int, step: Callable[[], None] = lambda: None
) -> list[Judgement]:
    """The heads of a folder and prompt lookup, for those assistants that are installed.

    Parameters
    ----------
    prompts
        ``[prompts, tokens]``; each is decoded alone.
    step
        Called after each text.
    """
    known = registry.manager().specs(AssistantSpec)
    asked: dict[str, dict[str, Any]] = {kind: {"heads": str(folder)}, BASELINE: {}}
    asked = {name: options for name, options in asked.items() if name in known}
    arguments = {"do_sample": False, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    plain = []
    for prompt in prompts if asked else ():
        plain.append(_generate(model, prompt, arguments))
        step()
    found = []
    for name, options in asked.items():
        assistant = hfkv.assistant(name, model, **options, **ALWAYS)
        same = tokens = verifications = examined = accepted = 0
        for prompt, expected in zip(prompts, plain, strict=True):
            output = _generate(model, prompt, {**arguments, **assistant})
            stats = hfkv.stats(output)
            same += int(torch.equal(output, expected))
            tokens, verifications = tokens + stats.tokens, verifications + stats.verifications
            examined, accepted = examined + stats.examined, accepted + stats.accepted
            step()
        rate = accepted / examined if examined else None
        found.append(Judgement(name, tokens / verifications, rate, same, len(prompts)))
    return found


def _generate(model: Any, prompt: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    ids = prompt[None].to(model.device)
    result: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    return result
