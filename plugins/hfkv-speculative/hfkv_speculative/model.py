"""A smaller model drafts.

Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hfkv import decoding
from hfkv.cache import option
from hfkv.speculation import Block, Call, Draft, RolloutDrafter, RolloutOptions

from .translator import Translator


@dataclass(frozen=True, kw_only=True)
class ModelOptions(RolloutOptions):
    """Options of the assistant "model"."""

    assistant_model: Any = option(None, "the model that drafts, or its folder or ID")
    tokenizer: Any = option(None, "the target's tokenizer, where the draft model has another one")
    assistant_tokenizer: Any = option(None, "the draft model's own tokenizer, where it has another one than the target")

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.assistant_model is None:
            raise ValueError("assistant_model is missing: the model that drafts, or its folder or ID")
        if (self.tokenizer is None) != (self.assistant_tokenizer is None):
            raise ValueError(
                "tokenizer and assistant_tokenizer go together: pass both where the two models' tokenizers differ, and "
                "neither where they have one tokenizer"
            )
        if self.tokenizer is not None and self.draft_sampling == "rejection":
            raise ValueError(
                "draft_sampling='rejection' needs both models' probabilities over one vocabulary, and the tokenizers "
                "differ. Use draft_sampling='coupled'"
            )


class ModelDrafter(RolloutDrafter):
    """The assistant "model"."""

    Options = ModelOptions
    options: ModelOptions
    resources: PreTrainedModel

    def __init__(self, call: Call, options: ModelOptions, resources: Any) -> None:
        super().__init__(call, options, resources)
        self._translator = None
        if options.tokenizer is not None:
            self._translator = Translator(self.model, options.tokenizer, options.assistant_tokenizer)

    @classmethod
    def prepare(cls, model: Any, options: ModelOptions) -> Any:
        """Load the draft model, where only its name is given."""
        draft = options.assistant_model
        if isinstance(draft, str):
            draft = AutoModelForCausalLM.from_pretrained(draft, dtype=model.dtype, device_map=model.device)
        if not isinstance(draft, PreTrainedModel) or not draft.can_generate():
            raise TypeError(f"assistant_model must be a language model, its folder or ID; got {type(draft).__name__}")
        if draft is model:
            raise ValueError("assistant_model is the model itself, which cannot be faster than itself")
        if draft.config.is_encoder_decoder:
            raise NotImplementedError("assistant_model has an encoder; only a decoder alone can draft")
        return draft.eval()

    def propose(self, block: Block) -> Draft:
        """Continue each row, through text where the tokenizers differ."""
        return super().propose(block) if self._translator is None else self._translator.propose(block)

    def draft_model(self) -> Any:
        """The draft model."""
        return self.resources

    def draft_cache(self) -> Any:
        """A cache of the draft model's own."""
        return decoding.draft_cache(self.resources)

    def ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Known tokens as the draft model can read them: one beyond its vocabulary becomes its first."""
        return ids.where(ids < self.model.get_input_embeddings().num_embeddings, 0)

    def adapt(self, logits: torch.Tensor) -> torch.Tensor:
        """Vocabularies of one tokenizer may be padded to different sizes: what only one has is never drafted."""
        size = self.call.model.get_output_embeddings().weight.shape[0]
        missing = size - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, :size]
