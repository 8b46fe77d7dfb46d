"""The same model with quantized weights, as one more candidate."""

from __future__ import annotations

import copy
from functools import partial

from transformers import DynamicCache, PreTrainedModel

import hfkv
from hfkv.cli.settings import parse_cache

from .candidates import Candidate


def parse_weights(text: str) -> tuple[str, hfkv.WeightConfig]:
    """``NAME`` or ``NAME:key=value,key=value``: what a table calls it, and the config; errors as of the config."""
    setting = parse_cache(text)
    return f"weights {setting.label}", hfkv.WeightConfig(setting.name, **setting.options)


def with_weights(model: PreTrainedModel, label: str, config: hfkv.WeightConfig) -> Candidate:
    """A copy of a model with its weights quantized, decoding from the plain cache."""
    quantized = hfkv.quantize_weights(copy.deepcopy(model), config)
    return Candidate(label, quantized, partial(DynamicCache, config=quantized.config.get_text_config(decoder=True)))
