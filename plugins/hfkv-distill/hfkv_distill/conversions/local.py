"""Local layers: most layers see a window of the newest tokens, and a few see all.

The layout of Gemma Team, "Gemma 3 Technical Report", 2025: five local layers, then a global one.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from .decoder import layers_of, rebuild

# architectures without local layers, and one that computes the same and has them
TWINS = {"llama": "ministral", "mistral": "ministral"}


def make_local(model: PreTrainedModel, local: int = 5, full: int = 1, window: int = 512) -> Any:
    """The model with ``local`` layers that see a window, then ``full`` layers that see all, and so on.

    A Llama or a Mistral becomes a Ministral, which is the same network with a kind for each layer.

    Parameters
    ----------
    window
        Tokens that a local layer sees, the newest one included.

    Raises
    ------
    ValueError
        Numbers below 1, or a model that has local layers already.
    NotImplementedError
        An architecture that has no local layers.
    """
    layers = layers_of(model)
    for option, value in (("local", local), ("full", full), ("window", window)):
        if value < 1:
            raise ValueError(f"{option}={value} must be at least 1")
    config = model.config
    kinds = getattr(config, "layer_types", None)
    if "sliding_attention" in (kinds or ()) or (kinds is None and getattr(config, "sliding_window", None)):
        # the kinds of a model that was trained with local layers differ in more than what they see
        raise ValueError(f"this {type(model).__name__} has local layers already, of {config.sliding_window} tokens")
    twin = TWINS.get(config.model_type)
    if twin is None and (kinds is None or not hasattr(config, "sliding_window")):
        raise NotImplementedError(
            f"{type(model).__name__} has no local layers, and no architecture is known that is the same with them. "
            f"Known: {', '.join(sorted(TWINS))}, and architectures with layer_types and sliding_window (Qwen2, Qwen3)"
        )
    changes: dict[str, Any] = {
        "layer_types": [
            "sliding_attention" if index % (local + full) < local else "full_attention" for index in range(len(layers))
        ],
        "sliding_window": window,
    }
    if hasattr(config, "use_sliding_window"):
        changes["use_sliding_window"] = True
    result = rebuild(model, model.state_dict(), changes, twin)
    for index, layer in enumerate(layers_of(result)):
        seen = getattr(layer.self_attn, "sliding_window", None)
        if seen != (window if changes["layer_types"][index] == "sliding_attention" else None):
            raise NotImplementedError(
                f"{type(result).__name__} does not read layer_types: its layer {index} sees "
                f"{'all tokens' if seen is None else f'{seen} tokens'}"
            )
    return result
