"""What all drafting heads have in common: a kind, a config of plain numbers, and a model that they fit."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Self

from torch import nn


class DraftHeads(nn.Module):
    """Heads that read the last hidden state of a model: what its output embedding reads, after the last norm.

    They hold none of the model's own weights: its embeddings are given to each call.

    Parameters
    ----------
    config
        An instance of ``Config``.
    """

    kind: ClassVar[str]
    Config: ClassVar[type[Any]]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    @classmethod
    @abstractmethod
    def for_model(cls, model: Any, **options: Any) -> Self:
        """Heads, untrained, of the model's sizes, dtype and device; ``options`` are fields of ``Config``."""

    def check(self, model: Any) -> None:
        """Raise ValueError where the heads were made for a model of other sizes."""
        expected = sizes(model)
        for name, value in expected.items():
            if getattr(self.config, name) != value:
                raise ValueError(
                    f"these {self.kind} heads have {name}={getattr(self.config, name)}, and {type(model).__name__} has "
                    f"{value}: they were trained for another model"
                )


def sizes(model: Any) -> dict[str, int]:
    """What heads have to share with their model."""
    vocabulary, hidden = model.get_output_embeddings().weight.shape
    return {"hidden_size": int(hidden), "vocab_size": int(vocabulary)}
