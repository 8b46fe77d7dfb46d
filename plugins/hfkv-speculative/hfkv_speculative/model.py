"""A smaller model drafts.

Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", 2023. Where the tokenizers
differ, the draft goes through text: Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding
Algorithms for Heterogeneous Vocabularies", 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache

from hfkv.cache import option
from hfkv.speculation import AssistantOptions, RolloutDrafter


@dataclass(frozen=True, kw_only=True)
class ModelOptions(AssistantOptions):
    """Options of the assistant "model"."""

    assistant_model: Any = option(None, "the model that drafts, or its folder or ID")


class ModelDrafter(RolloutDrafter):
    """The assistant "model", for models of one tokenizer; vocabularies may be padded differently."""

    Options = ModelOptions
    resources: PreTrainedModel

    @classmethod
    def prepare(cls, model: Any, options: ModelOptions) -> Any:
        """Load the draft model, where only its name is given."""
        draft = options.assistant_model
        if draft is None:
            raise ValueError("assistant_model is missing: the model that drafts, or its folder or ID")
        if isinstance(draft, str):
            draft = AutoModelForCausalLM.from_pretrained(draft, dtype=model.dtype, device_map=model.device)
        if not isinstance(draft, PreTrainedModel) or not draft.can_generate():
            raise TypeError(f"assistant_model must be a language model, its folder or ID; got {type(draft).__name__}")
        if draft is model:
            raise ValueError("assistant_model is the model itself, which cannot be faster than itself")
        if draft.config.is_encoder_decoder:
            raise NotImplementedError("assistant_model has an encoder; a decoder alone can draft")
        return draft.eval()

    def draft_model(self) -> Any:
        """The draft model."""
        return self.resources

    def draft_cache(self) -> Any:
        """A cache of the draft model's own."""
        return DynamicCache(config=self.resources.config.get_text_config(decoder=True))
