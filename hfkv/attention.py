"""Attention that reads handles: packed ones without dequantizing them, and those of windowed layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# the attribute of an attention function that holds what reads windows in its place
_WRAPPED = "_hfkv_reads_windows"

# who is shown the queries, while a model is asked how it turns them
_watching: list[Callable[[Any, torch.Tensor], object]] = []


@contextmanager
def watch(see: Callable[[Any, torch.Tensor], object]) -> Iterator[None]:
    """Show every attention module that runs, with its query, where hfkv is active."""
    _watching.append(see)
    try:
        yield
    finally:
        _watching.remove(see)


def wrap_interface(original: Callable[..., Any]) -> Callable[..., Any]:
    """`AttentionInterface.get_interface`, so that every implementation (a model's own eager one too) reads windows."""

    @functools.wraps(original)
    def get_interface(*args: Any, **kwargs: Any) -> Any:
        function = original(*args, **kwargs)
        # kept with the function, where torch.compile can look it up: a cache of calls would break the graph
        wrapped = getattr(function, _WRAPPED, None)
        if wrapped is None:
            wrapped = _for_windows(function)
            # a method or a builtin takes no attributes: wrapped anew each time
            with suppress(AttributeError):
                setattr(function, _WRAPPED, wrapped)
        return wrapped

    return get_interface


def _for_windows(original: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function that leaves the handles of windowed layers to our own."""
    from .cache.window import WindowHandle
    from .kernels.window import attend as attend_window

    attend = outside_graphs(attend_window)

    @functools.wraps(original)
    def attention_forward(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        for see in _watching:
            see(module, query)
        if isinstance(key, WindowHandle):
            return attend(module, query, key.snapshot, attention_mask, *args, **kwargs), None
        return original(module, query, key, value, attention_mask, *args, **kwargs)

    return attention_forward


def wrap_expansion(original: Callable[..., Any]) -> Callable[..., Any]:
    """``expand_kv`` of a latent attention, which makes keys and values of cached latents: of a window's too."""
    from .cache.window import WindowHandle

    @functools.wraps(original)
    def expand_kv(self: Any, latents: torch.Tensor, rotary_keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(latents, WindowHandle):
            expanded: tuple[torch.Tensor, torch.Tensor] = original(self, latents, rotary_keys)
            return expanded
        view = latents.snapshot.expanded(functools.partial(original, self))
        return WindowHandle(view, "keys"), WindowHandle(view, "values")

    return expand_kv


def outside_graphs(function: Callable[..., Any]) -> Any:
    """A function that torch.compile leaves alone, and that costs no more than itself where nothing is compiled."""
    import torch

    disabled = torch.compiler.disable(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return disabled(*args, **kwargs) if torch.compiler.is_compiling() else function(*args, **kwargs)

    return call


def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers' sdpa attention, which runs the fused kernels where keys and values are packed handles."""
    from .cache.view import KVHandle
    from .kernels.packed import attend as attend_packed

    # the choice of a kernel is made once, outside any graph; attention without handles compiles as ever
    attend = outside_graphs(attend_packed)

    @functools.wraps(original)
    def sdpa_attention_forward(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(key, KVHandle):
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        plain = not args and not kwargs.get("dropout")
        # these change the scores; whatever else there is the original function ignores or refuses
        plain = plain and kwargs.get("position_bias") is None and kwargs.get("softcap") is None
        if not (plain and isinstance(value, KVHandle) and value.snapshot is key.snapshot):
            value = value.dense() if isinstance(value, KVHandle) else value
            return original(module, query, key.dense(), value, attention_mask, *args, **kwargs)
        return attend(module, query, key.snapshot, attention_mask, kwargs.get("scaling"), kwargs.get("is_causal")), None

    return sdpa_attention_forward
