"""Batches of examples of different lengths, padded on the right.

What is padding is known by length and never by its token: where the padding token is the end of text, as it is for many
models, the end of text is still learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

IGNORED = -100

# what each key of an example is padded with; what is not here is padded with 0
_FILL = {"labels": IGNORED, "teacher_labels": IGNORED}


@dataclass(frozen=True)
class DistillationCollator:
    """Pads examples to the longest of a batch.

    An example has ``input_ids`` and may have ``labels`` (-100 where nothing is learned; by default every token is) and
    what a stored teacher adds. Where the teacher reads another prompt (``teacher_input_ids``, ``teacher_labels``), the
    targets of both are the same tokens.

    Parameters
    ----------
    pad_token_id
        Any token will do: it is masked.
    """

    pad_token_id: int = 0

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """The batch: each key ``[batch, tokens, ...]``, with ``attention_mask`` and ``labels``."""
        rows = [self._completed(example) for example in examples]
        return {key: self._padded(key, [row[key] for row in rows]) for key in rows[0]}

    def _completed(self, example: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        row = {key: torch.as_tensor(value) for key, value in example.items() if not key.endswith("attention_mask")}
        for prefix in ("", "teacher_"):
            ids = row.get(f"{prefix}input_ids")
            if ids is None:
                continue
            if prefix and f"{prefix}labels" not in row:
                raise ValueError("an example with teacher_input_ids needs teacher_labels too")
            labels = row.get(f"{prefix}labels", ids).clone()
            if len(labels) != len(ids):
                raise ValueError(f"{prefix}labels has {len(labels)} tokens, and {prefix}input_ids {len(ids)}")
            # nothing comes before the first token, so nothing can predict it
            labels[:1] = IGNORED
            row[f"{prefix}labels"] = labels
            row[f"{prefix}attention_mask"] = torch.ones_like(ids)
        return row

    def _padded(self, key: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        fill = self.pad_token_id if key.endswith("input_ids") else _FILL.get(key, 0)
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)
