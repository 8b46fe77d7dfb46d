"""The same model with quantized weights, as one more candidate."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from transformers import DynamicCache, PreTrainedModel

import hfkv
from hfkv.cli.weights import WeightSetting

from .candidates import Candidate


def with_weights(model: PreTrainedModel, tokenizer: Any, weights: WeightSetting) -> Candidate:
    """A copy of a model with its weights quantized, decoding from the plain cache."""
    quantized = hfkv.quantize_weights(copy.deepcopy(model), weights.config(tokenizer))
    make_cache = partial(DynamicCache, config=quantized.config.get_text_config(decoder=True))
    return Candidate(f"weights {weights.label}", quantized, make_cache)
