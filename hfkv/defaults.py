"""Make a model default to a technique, in a way that loads where hfkv is not installed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from . import registry
from .specs import AssistantSpec, CacheSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "hfkv"
ASSISTANT = "assistant"


def set_default(model: PreTrainedModel, name: str | None, **options: Any) -> None:
    """Let ``model.generate`` use a cache, or an assistant, where the caller names none.

    The choice is stored in ``model.generation_config`` under the key ``"hfkv"``, which `save_pretrained` keeps and any
    process can load. (A saved ``cache_implementation="kivi"`` cannot be loaded where hfkv is missing.) A model has
    one default cache and one default assistant at most.

    Parameters
    ----------
    name
        A registered cache or assistant; None removes both defaults.
    **options
        The technique's options, as for ``cache_config`` or `hfkv.assistant`.

    Raises
    ------
    ValueError, ImportError
        As `hfkv.make_cache` and `hfkv.assistant`; or an assistant's option that cannot be saved.
    NotImplementedError
        The model's `generate` takes no cache by name, or the assistant cannot work with the model.
    TypeError
        The model has no `generate`.
    """
    if not model.can_generate():
        raise TypeError(f"{type(model).__name__} has no generate to set a default for")
    if name is None:
        if hasattr(model.generation_config, KEY):
            delattr(model.generation_config, KEY)
        return
    stored = dict(getattr(model.generation_config, KEY, None) or {})
    if _is_assistant(name):
        stored[ASSISTANT] = _checked_assistant(model, name, options)
    else:
        _check_cache(model, name, options)
        assistant = {key: value for key, value in stored.items() if key == ASSISTANT}
        stored = {"cache": name, **copy.deepcopy(options), **assistant}
    setattr(model.generation_config, KEY, stored)
    # a config that was derived from the model's is loaded without its custom keys, and this one no longer is
    model.generation_config._from_model_config = False


def _is_assistant(name: str) -> bool:
    known = registry.manager()
    return name in known.specs(AssistantSpec) and name not in known.specs(CacheSpec)


def _check_cache(model: PreTrainedModel, name: str, options: Mapping[str, Any]) -> None:
    from . import integration
    from .cache.build import build_cache

    integration.check_model(model, name)
    build_cache(name, model, options)


def _checked_assistant(model: PreTrainedModel, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    from .speculation.door import default_assistant

    stored = {"name": name, **copy.deepcopy(options)}
    try:
        json.dumps(stored)
    except TypeError as error:
        raise ValueError(
            f"the options of {name!r} are saved with the model, and these cannot be: {error}. Pass plain values (a "
            f"model's folder or ID in place of the model), or pass hfkv.assistant({name!r}, model, ...) to generate"
        ) from error
    default_assistant(model, stored)
    return stored


def get_default(*generation_configs: Any) -> tuple[str, dict[str, Any]] | None:
    """The default cache of the first config that has one, and its options."""
    for stored in _stored(generation_configs):
        if "cache" in stored:
            options = {key: value for key, value in stored.items() if key not in ("cache", ASSISTANT)}
            return stored["cache"], options
    return None


def get_default_assistant(*generation_configs: Any) -> dict[str, Any] | None:
    """The default assistant of the first config that has one: its name and options."""
    for stored in _stored(generation_configs):
        if ASSISTANT in stored:
            return dict(stored[ASSISTANT])
    return None


def _stored(generation_configs: Any) -> Iterator[Mapping[str, Any]]:
    for generation_config in generation_configs:
        stored = getattr(generation_config, KEY, None)
        if not stored:
            continue
        if not isinstance(stored, Mapping) or not {"cache", ASSISTANT} & set(stored):
            raise ValueError(
                f"generation_config.{KEY}={stored!r} names no cache and no assistant. "
                "Fix: hfkv.set_default(model, name)"
            )
        yield stored
