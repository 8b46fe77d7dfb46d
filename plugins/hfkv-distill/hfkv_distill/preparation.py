"""What has to go together before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hfkv

from .config import DistillationConfig
from .stored import StoredLogits


def prepared_teacher(teacher: Any, student: Any, args: DistillationConfig) -> Any:
    """The teacher, in evaluation and frozen, quantized where that is asked for; None without one.

    Raises
    ------
    ValueError
        Arguments that need a teacher, or that leave it nothing to say.
    """
    if teacher is None:
        for name in ("lmbda", "hidden_weight", "attention_weight", "kv_weight", "teacher_weights"):
            if getattr(args, name):
                raise ValueError(f"{name}={getattr(args, name)!r} needs teacher_model")
        return None
    if not args.objective.needs_teacher and not any(args.match_weights.values()):
        raise ValueError("teacher_model would be ignored: alpha=1 learns from labels alone")
    if teacher.config is getattr(student, "config", None):
        raise ValueError("teacher_model and model share one config object: load or copy one of them anew")
    if args.teacher_weights is not None:
        hfkv.quantize_weights(teacher, hfkv.WeightConfig(**args.teacher_weights))
    teacher.requires_grad_(False)
    return teacher.eval()


def stored_vocabulary(train: Any, evaluated: Any, teacher: Any, temperature: float, size: int) -> int | None:
    """The outcomes that stored logits are of; None where no data set has them.

    Parameters
    ----------
    train, evaluated
        The data sets; ``evaluated`` may be several by name.
    size
        Outcomes that the student knows.

    Raises
    ------
    ValueError
        Logits that were stored for another loss, or a teacher besides.
    """
    found = None
    for dataset in (train, *(evaluated.values() if isinstance(evaluated, Mapping) else (evaluated,))):
        if not isinstance(dataset, StoredLogits):
            continue
        if teacher is not None:
            raise ValueError("the data has stored logits and there is a teacher_model: pass one of them")
        if dataset.temperature != temperature:
            raise ValueError(
                f"temperature={temperature!r}, and the stored logits are at {dataset.temperature!r}: store them at "
                "that of the loss"
            )
        if dataset.vocabulary > size:
            raise ValueError(
                f"the stored logits are of {dataset.vocabulary:,} outcomes, and the student knows {size:,}. "
                f"Fix: store_teacher_logits(vocabulary={size})"
            )
        found = dataset.vocabulary
    return found
