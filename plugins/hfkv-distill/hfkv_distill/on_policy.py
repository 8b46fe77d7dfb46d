"""Batches whose responses the student generates, so that it learns where it goes itself.

*On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes* (Agarwal et al., 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .collator import IGNORED, DistillationCollator


@torch.no_grad()
def generated(
    model: Any, inputs: Mapping[str, torch.Tensor], collate: DistillationCollator, seed: int, **arguments: Any
) -> dict[str, torch.Tensor]:
    """A batch of the same prompts, continued by the student; what it generates are the targets.

    Parameters
    ----------
    inputs
        A batch, padded on the right. A prompt is what comes before the first target.
    seed
        Of the sampling: the random numbers of training stay as they are.
    **arguments
        For `generate`: ``max_new_tokens``, ``temperature``, ``prompt_length`` (of rows whose prompt is shorter) and a
        cache.
    """
    least = arguments.pop("prompt_length")
    rows = zip(inputs["input_ids"], inputs["attention_mask"], inputs["labels"], strict=True)
    prompts = [_prompt(*row, least) for row in rows]
    width = max(map(len, prompts))
    device = model.device
    ids = torch.full((len(prompts), width), collate.pad_token_id, device=device)
    mask = torch.zeros_like(ids)
    for index, prompt in enumerate(prompts):
        ids[index, width - len(prompt) :] = prompt
        mask[index, width - len(prompt) :] = 1
    training = model.training
    model.eval()
    try:
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            output = model.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0,
                pad_token_id=collate.pad_token_id, **arguments,
            )  # fmt: skip
    finally:
        model.train(training)
    ends = _end_tokens(model)
    examples = []
    for prompt, response in zip(prompts, output[:, width:], strict=True):
        row = torch.cat([prompt.to(device), _until_end(response, ends)])
        labels = row.clone()
        labels[: len(prompt)] = IGNORED
        examples.append({"input_ids": row, "labels": labels})
    return collate(examples)


def _prompt(ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor, least: int) -> torch.Tensor:
    """What comes before the first target: at least so many tokens, at most all."""
    length = int(mask.sum())
    targets = (labels[:length] != IGNORED).nonzero()
    first = int(targets[0]) if len(targets) else length
    return ids[: min(max(first, least), length)]


def _end_tokens(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _until_end(response: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """A response with the token that ends it; what follows is padding, whatever its tokens."""
    for place, token in enumerate(response.tolist()):
        if token in ends:
            return response[: place + 1]
    return response
