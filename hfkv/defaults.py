"""Make a model default to a technique, in a way that loads where hfkv is not installed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "hfkv"


def set_default(model: PreTrainedModel, name: str | None, **options: Any) -> None:
    """Let ``model.generate`` use a cache where the caller names none.

    The choice is stored in ``model.generation_config`` under the key ``"hfkv"``, which `save_pretrained` keeps and any
    process can load. (A saved ``cache_implementation="kivi"`` cannot be loaded where hfkv is not installed.)

    Parameters
    ----------
    name
        A registered cache; None removes the default.
    **options
        The technique's options, as for ``cache_config``.

    Raises
    ------
    ValueError, ImportError
        As `hfkv.make_cache`.
    NotImplementedError
        The model's `generate` takes no cache by name.
    TypeError
        The model has no `generate`.
    """
    from . import integration
    from .cache.build import build_cache

    if not model.can_generate():
        raise TypeError(f"{type(model).__name__} has no generate to set a default for")
    if name is None:
        if hasattr(model.generation_config, KEY):
            delattr(model.generation_config, KEY)
        return
    integration.check_model(model, name)
    build_cache(name, model, options)
    setattr(model.generation_config, KEY, {"cache": name, **copy.deepcopy(options)})
    # a config that was derived from the model's is loaded without its custom keys, and this one no longer is
    model.generation_config._from_model_config = False


def get_default(*generation_configs: Any) -> tuple[str, dict[str, Any]] | None:
    """The default of the first config that has one: the cache's name and its options."""
    for generation_config in generation_configs:
        stored = getattr(generation_config, KEY, None)
        if stored:
            if not isinstance(stored, Mapping) or "cache" not in stored:
                raise ValueError(
                    f"generation_config.{KEY}={stored!r} names no cache. Fix: hfkv.set_default(model, name)"
                )
            options = dict(stored)
            return options.pop("cache"), options
    return None
