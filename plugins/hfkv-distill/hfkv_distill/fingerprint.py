"""What stored results belong to: hashes of a model, of a tokenizer, of data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from .targets import Targets


def of_model(model: Any) -> str:
    """A hash of every weight, by name, dtype and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def of_tokenizer(tokenizer: Any) -> str | None:
    """A hash of its tokens and their numbers; None without one."""
    if tokenizer is None:
        return None
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def of_data(examples: Sequence[Any], collate: Any) -> str:
    """A hash of every example's tokens and of which of them are targets."""
    found = hashlib.sha256()
    # a data set of the Hub ends by its length, not by an IndexError
    for index in range(len(examples)):
        row = collate([examples[index]])
        found.update(row["input_ids"].numpy().tobytes())
        found.update(row["labels"].numpy().tobytes())
        if "teacher_input_ids" in row:
            found.update(row["teacher_input_ids"].numpy().tobytes())
            found.update(Targets(row["teacher_labels"]).tokens.numpy().tobytes())
        found.update(b"|")
    return found.hexdigest()
