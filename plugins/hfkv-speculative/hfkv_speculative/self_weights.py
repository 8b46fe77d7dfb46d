"""The model itself drafts, with quantized weights, from the target's own cache.

Tiwari et al., "QuantSpec: Self-Speculative Decoding with Hierarchical Quantized KV Cache", 2025, for the weights' part.
The copy holds the linear layers alone, in 4 bits; embeddings, norms and whatever else stays in full precision are the
model's own tensors.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import hfkv
from hfkv.cache import option
from hfkv.speculation import RolloutOptions

from .shared import SharedCacheDrafter


@dataclass(frozen=True, kw_only=True)
class SelfWeightsOptions(RolloutOptions):
    """Options of the assistant "self-weights"."""

    backend: str = option("rtn", "the weight quantizer that makes the copy")
    backend_options: Mapping[str, Any] | None = option(None, "its options, as for hfkv.WeightConfig; None: 4 bits")


class SelfWeightsDrafter(SharedCacheDrafter):
    """The assistant "self-weights"."""

    Options = SelfWeightsOptions

    @classmethod
    def prepare(cls, model: Any, options: SelfWeightsOptions) -> Any:
        """Quantize a copy whose tensors are the model's own where they are not quantized."""
        cls.check_model(model)
        given = {"nbits": 4} if options.backend_options is None else dict(options.backend_options)
        config = hfkv.WeightConfig(options.backend, **given)
        own = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
        return hfkv.quantize_weights(copy.deepcopy(model, own), config).eval()

    def draft_model(self) -> Any:
        """The quantized copy."""
        return self.resources
