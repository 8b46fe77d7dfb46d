"""Distillation for hfkv: train away what compression breaks, with the original model as teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .chunked import chunked_loss as chunked_loss
    from .collator import DistillationCollator as DistillationCollator
    from .config import DistillationConfig as DistillationConfig
    from .losses import Objective as Objective
    from .losses import TopK as TopK
    from .losses import divergence as divergence
    from .losses import token_losses as token_losses
    from .stored import StoredLogits as StoredLogits
    from .stored import store_teacher_logits as store_teacher_logits
    from .trainer import DistillationTrainer as DistillationTrainer

# resolved when it is first used: a plugin is found, and listed, without torch
_HOME = {
    "DistillationCollator": "collator",
    "DistillationConfig": "config",
    "DistillationTrainer": "trainer",
    "Objective": "losses",
    "StoredLogits": "stored",
    "TopK": "losses",
    "chunked_loss": "chunked",
    "divergence": "losses",
    "store_teacher_logits": "stored",
    "token_losses": "losses",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hfkv_distill' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
