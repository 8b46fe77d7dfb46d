"""The arguments of `DistillationTrainer`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import TrainingArguments

from .losses import Objective
from .matching import check_weights


@dataclass
class DistillationConfig(TrainingArguments):
    """Transformers' `TrainingArguments`, and what distillation adds.

    Raises
    ------
    ValueError
        A value that is not allowed.
    """

    alpha: float = field(
        default=0.0, metadata={"help": "share of the hard labels; 1 trains on them alone, without a teacher"}
    )
    beta: float = field(
        default=0.0, metadata={"help": "the divergence: 0 forward KL, 1 reverse KL, between them Jensen-Shannon"}
    )
    temperature: float = field(
        default=1.0, metadata={"help": "softens teacher and student in the loss, whose size its square keeps"}
    )
    logits_chunk_size: int = field(default=256, metadata={"help": "targets whose logits exist together"})
    lmbda: float = field(default=0.0, metadata={"help": "share of batches whose responses the student generates"})
    max_new_tokens: int = field(default=64, metadata={"help": "tokens that the student generates"})
    prompt_length: int = field(
        default=16, metadata={"help": "tokens of an example without a prompt that the student goes on from"}
    )
    sampling_temperature: float = field(
        default=1.0, metadata={"help": "of the student's generations; the loss does not see it"}
    )
    cache_implementation: str | None = field(
        default=None, metadata={"help": "the cache that the student generates with"}
    )
    cache_config: dict[str, Any] | str | None = field(default=None, metadata={"help": "options of that cache"})
    hidden_weight: float = field(default=0.0, metadata={"help": "what matching the outputs of layers counts"})
    attention_weight: float = field(default=0.0, metadata={"help": "what matching the outputs of attention counts"})
    kv_weight: float = field(default=0.0, metadata={"help": "what matching keys and values counts"})
    layer_map: dict[int, int] | str | None = field(
        default=None,
        metadata={
            "help": "the teacher's layer for each of the student's that is matched; by default all, spread evenly"
        },
    )
    train_cache: str | None = field(
        default=None, metadata={"help": "a quantized cache that the student sees in training, e.g. kivi"}
    )
    train_cache_config: dict[str, Any] | str | None = field(default=None, metadata={"help": "options of that cache"})
    teacher_weights: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "quantizes the teacher: arguments of hfkv.WeightConfig, e.g. {'backend': 'rtn', 'nbits': 8}"},
    )

    # what may come as JSON from a command line
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *TrainingArguments._VALID_DICT_FIELDS,
        "cache_config",
        "layer_map",
        "train_cache_config",
        "teacher_weights",
    ]

    def __post_init__(self) -> None:
        """Check what is ours, then what is transformers'."""
        self.objective  # noqa: B018
        check_weights(self.match_weights)
        if not 0 <= self.lmbda <= 1:
            raise ValueError(f"lmbda={self.lmbda!r} must be from 0 to 1")
        for name in ("logits_chunk_size", "max_new_tokens", "prompt_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 1")
        if self.sampling_temperature <= 0:
            raise ValueError(f"sampling_temperature={self.sampling_temperature!r} must be above 0")
        for options, name in (("cache_config", "cache_implementation"), ("train_cache_config", "train_cache")):
            if getattr(self, options) is not None and getattr(self, name) is None:
                raise ValueError(f"{options}={getattr(self, options)!r} would be ignored: set {name}")
        if self.layer_map is not None and not any(self.match_weights.values()):
            raise ValueError(
                f"layer_map={self.layer_map!r} would be ignored: set hidden_weight, attention_weight or kv_weight"
            )
        if self.cache_implementation is not None and self.lmbda == 0:
            raise ValueError(
                f"cache_implementation={self.cache_implementation!r} would be ignored: the student generates nothing "
                "with lmbda=0. For a cache that is seen in training, set train_cache"
            )
        super().__post_init__()

    @property
    def objective(self) -> Objective:
        """What the loss of a token is."""
        return Objective(alpha=self.alpha, beta=self.beta, temperature=self.temperature)

    @property
    def match_weights(self) -> dict[str, float]:
        """What matching counts, by kind."""
        return {"hidden": self.hidden_weight, "attention": self.attention_weight, "kv": self.kv_weight}
