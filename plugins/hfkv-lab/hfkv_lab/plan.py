"""What fits on a card: weights, caches, users and context, by arithmetic alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hfkv.cache import KVLayer, StateShape
from hfkv.cache.build import build_cache
from hfkv.cache.memory import tensor_bytes
from hfkv.cli.settings import Setting

from .plan_model import PlanModel
from .plan_weights import WeightFormat

# transformers' caches whose bytes are those of full precision
FULL_PRECISION = ("dynamic", "static")
# no card holds more; where a context ends that nothing else limits
_ENDLESS = 2**40


class CachePlan:
    """The bytes of a cache at any length, from the layers that it would have.

    Raises
    ------
    NotImplementedError
        A layer's bytes are not known without running the model.
    """

    def __init__(self, model: PlanModel, setting: Setting, dtype: torch.dtype = torch.float16) -> None:
        self.setting = setting
        self.itemsize = dtype.itemsize
        if setting.name in FULL_PRECISION:
            layers: Sequence[Any] = DynamicCache(config=model.config).layers
        elif setting.is_ours:
            layers = build_cache(setting.name, model.config, setting.options).layers
        else:
            raise NotImplementedError(
                f"--cache {setting.name}: plan knows {', '.join(FULL_PRECISION)} and the plugins' caches. "
                "Fix: the options of transformers' 'quantized' work with kivi too"
            )
        # layers that share another's store nothing, and at the end of the list transformers has none for them
        pairs = zip(layers, model.shapes, strict=False)
        self._layers = [(layer, shape) for layer, shape in pairs if shape.elements]
        self._known: dict[int, int] = {}
        self.bytes(1)

    def bytes(self, tokens: int, batch_size: int = 1) -> int:
        """Bytes after a prompt of that many tokens for each row."""
        if tokens not in self._known:
            self._known[tokens] = sum(
                _layer_bytes(
                    layer, tokens, StateShape(1, shape.kv_heads, shape.key_dim, shape.value_dim, self.itemsize)
                )
                for layer, shape in self._layers
            )
        return batch_size * self._known[tokens]

    def elements(self, tokens: int) -> int:
        """Numbers that the cache stands for, in layers that hold any."""
        return sum(shape.elements * _held(layer, tokens) for layer, shape in self._layers)

    def bits_per_element(self, tokens: int) -> float:
        """Stored bits per number of keys and values."""
        return 8 * self.bytes(tokens) / self.elements(tokens)

    def longest(self, room: float, limit: int | None = None) -> int:
        """The longest context whose cache takes at most ``room`` bytes, and no more than the model's limit."""
        low, high = 0, 1
        top = limit or _ENDLESS
        while high < top and self.bytes(high) <= room:
            low, high = high, min(2 * high, top)
        if self.bytes(high) <= room:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes(middle) <= room else (low, middle)
        return low


def _layer_bytes(layer: Any, tokens: int, shape: StateShape) -> int:
    if isinstance(layer, KVLayer):
        return layer.planned_bytes(tokens, shape)
    per_token = shape.kv_heads * (shape.key_dim + shape.value_dim) * shape.itemsize
    # a sliding layer keeps its window's length in a tensor
    return per_token * _held(layer, tokens) + sum(tensor_bytes(layer).values())


def _held(layer: Any, tokens: int) -> int:
    """Tokens that a layer holds while decoding."""
    if isinstance(layer, KVLayer) or type(layer) is DynamicLayer:
        return tokens
    if type(layer) is DynamicSlidingWindowLayer:
        # one token less between two steps, one step's token more within them
        return min(tokens, layer.sliding_window)
    if type(layer).__name__ == "DummyLayer":
        # it reads another layer's
        return 0
    raise NotImplementedError(
        f"plan counts full-attention, sliding and sharing layers, and this model has a {type(layer).__name__}, whose "
        "size is known only once it has run. Fix: measure it with hfkv bench"
    )


@dataclass(frozen=True)
class Fit:
    """A format of weights and a cache on a card.

    Attributes
    ----------
    memory
        Bytes of the card.
    longest_context
        Tokens for each of the users; 0 where nothing fits.
    most_users
        Users with the asked context each; 0 where nothing fits.
    limited
        Whether the model's own limit, not the card, ends the context.
    """

    weights: str
    cache: str
    memory: float
    weight_bytes: int
    longest_context: int
    most_users: int
    limited: bool


def fit(
    model: PlanModel,
    weights: WeightFormat,
    cache: CachePlan,
    memory: float,
    *,
    users: int = 1,
    context: int = 8192,
    overhead: float = 1e9,
) -> Fit:
    """What a card holds besides the weights and the overhead.

    Parameters
    ----------
    memory, overhead
        Bytes of the card, and of what is neither weights nor cache.
    users
        How many the longest context is for.
    context
        Tokens of each user, of whom there are to be as many as possible.
    """
    weight_bytes = weights.bytes_of(model.parameters)
    room = memory - overhead - weight_bytes
    longest = cache.longest(room / users, model.limit) if room > 0 else 0
    most = max(0, int(room // cache.bytes(context)))
    return Fit(
        weights.name,
        cache.setting.label,
        memory,
        weight_bytes,
        longest,
        most,
        limited=longest == model.limit,
    )
