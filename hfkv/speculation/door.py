"""`hfkv.assistant`: from a name to the keywords that `generate` takes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from .. import autoload, registry
from ..specs import AssistantSpec
from .drafter import AssistantOptions, Drafter


class Assistant:
    """What `generate` is given as ``custom_generate``: a drafter's class with what it needs, for one model.

    It can be used for any number of calls, none of which depends on another, and by several threads.
    """

    # tells `integration` to hand over the streamer and the tokenizer, which transformers drops
    takes_mode_arguments = True

    def __init__(self, name: str, model: Any, options: Mapping[str, Any]) -> None:
        self.name = name
        self.drafter_class: type[Drafter] = registry.find(AssistantSpec, name, "assistant")
        self.options: AssistantOptions = self.drafter_class.Options.parse(options, name)
        self.resources = self.drafter_class.prepare(model, self.options)
        self._model = weakref.ref(model)

    def __repr__(self) -> str:
        return f"Assistant({self.name!r}, {self.options})"

    def __call__(
        self,
        model: Any,
        input_ids: Any,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any = None,
        synced_gpus: bool = False,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """The decoding loop, with the arguments of transformers' own decoding methods."""
        from .loop import Speculation

        if model is not self._model():
            raise ValueError(
                f"the assistant {self.name!r} was made for another model than this {type(model).__name__}. "
                f"Fix: hfkv.assistant({self.name!r}, model, ...)"
            )
        if synced_gpus:
            raise NotImplementedError(
                "synced_gpus=True needs as many forwards on every GPU, and speculation takes as many as there are "
                "rejections. Generate without an assistant"
            )
        arguments = {
            "model": model,
            "input_ids": input_ids,
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "generation_config": generation_config,
            "streamer": streamer,
            **model_kwargs,
        }
        return Speculation(self.name, self.drafter_class, self.options, self.resources, arguments).run()


def assistant(name: str, model: Any, **options: Any) -> dict[str, Any]:
    """Keywords for ``model.generate`` that make it decode speculatively: the same text, in fewer forwards.

    ::

        output = model.generate(**inputs, **hfkv.assistant("lookup", model), max_new_tokens=200)
        print(hfkv.stats(output))

    Parameters
    ----------
    name
        A registered assistant; ``hfkv list`` shows them.
    model
        The model that will generate.
    **options
        The assistant's options.

    Returns
    -------
    dict
        Keywords for `generate`, for any number of calls. What is loaded or built is so once, here.

    Raises
    ------
    ValueError
        Unknown name or option, or a value that is not allowed.
    NotImplementedError
        The assistant cannot work with this model.
    ImportError
        The assistant's requirements are not installed.
    RuntimeError
        hfkv is not active: transformers would drop the streamer and the tokenizer.
    """
    if not autoload.is_active():
        raise RuntimeError(
            "hfkv is not active, and without it transformers drops `streamer` and `tokenizer` when an assistant "
            "decodes. Fix: hfkv.activate()"
        )
    return {"custom_generate": Assistant(name, model, options)}


# by model: what was asked for, and the assistant that was made of it
_defaults: weakref.WeakKeyDictionary[Any, tuple[dict[str, Any], Assistant]] = weakref.WeakKeyDictionary()


def default_assistant(model: Any, stored: Mapping[str, Any]) -> Assistant:
    """The assistant that `hfkv.set_default` stored with a model, made when it is first used."""
    found = _defaults.get(model)
    if found is None or found[0] != dict(stored):
        options = dict(stored)
        found = dict(stored), Assistant(options.pop("name"), model, options)
        _defaults[model] = found
    return found[1]
