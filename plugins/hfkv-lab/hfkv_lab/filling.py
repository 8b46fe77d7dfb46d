"""An empty cache, filled with what the plain cache has read."""

from __future__ import annotations

import copy

from transformers import Cache
from transformers.cache_utils import DynamicLayer

from hfkv.cache import KVLayer


def filled(cache: Cache, plain: Cache) -> Cache:
    """An empty cache after it was given the keys and values of one that has read a prompt in one forward.

    A prompt is attended to before it is packed, so the keys and values of a cache that keeps every token do not depend
    on the cache: one prefill serves all.

    Raises
    ------
    NotImplementedError
        A technique took a layer that sees only a part of the prompt.
    """
    for index, layer in enumerate(plain.layers):
        if type(layer) is DynamicLayer and layer.keys is not None:
            cache.update(layer.keys.clone(), layer.values.clone(), index)
        elif isinstance(cache.layers[index], KVLayer):
            raise NotImplementedError(
                f"layer {index} has a {type(layer).__name__} in the plain cache: only full-attention layers can be "
                "filled with what it has read"
            )
        else:
            # a layer that keeps a window: no technique touches it
            cache.layers[index] = copy.deepcopy(layer)
    return cache
