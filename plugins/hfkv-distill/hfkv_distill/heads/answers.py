"""What a model says of its own accord: the text that its drafting heads will meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

# prompts that are answered together
_BATCH = 32
# near what the model would choose, and not the same loop again and again, which small models fall into
_TEMPERATURE = 0.7


def answers(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    new_tokens: int,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[int]]:
    """Each prompt and the model's sampled answer, as tokens, in the form of a chat where the tokenizer knows one.

    The text of the *self-distillation* of Medusa (Cai et al., 2024): heads learn to draft what the model writes.

    Parameters
    ----------
    new_tokens
        Tokens of an answer, at most.
    progress
        Called with the prompts that are answered, and all.
    """
    found: list[list[int]] = []
    ends = _ends(model)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for start in range(0, len(prompts), _BATCH):
            asked = [_ids(tokenizer, prompt) for prompt in prompts[start : start + _BATCH]]
            longest = max(map(len, asked))
            ids = torch.tensor([[0] * (longest - len(row)) + row for row in asked], device=model.device)
            mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in asked], device=model.device)
            output = model.generate(
                ids, attention_mask=mask, do_sample=True, temperature=_TEMPERATURE, max_new_tokens=new_tokens
            )
            for row, said in zip(asked, output[:, longest:].tolist(), strict=True):
                # what follows the end is padding
                end = next((place + 1 for place, token in enumerate(said) if token in ends), len(said))
                found.append(row + said[:end])
            progress(len(found), len(prompts))
    return found


def _ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt).input_ids)
    chat = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])


def _ends(model: Any) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set() if ends is None else set(ends) if isinstance(ends, list) else {ends}
