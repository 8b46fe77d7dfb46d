"""The layers of the caches "sink" and "window".

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023. Attention has to go somewhere, and models
learn to send what is left over to the first tokens. A window that loses them loses the model; one that keeps a few of
them goes on for ever, at the positions that the kept tokens have among themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hfkv.cache import CacheOptions, LayerContext, SegmentedLayer, check_choice, check_length, make_window, option
from hfkv.cache.window import POSITIONS


@dataclass(frozen=True, kw_only=True)
class WindowOptions(CacheOptions):
    """Options of ``cache_implementation="window"``."""

    window_length: int = option(1024, "newest tokens that each query sees, itself included")

    def __post_init__(self) -> None:
        """Check the length."""
        check_length("window_length", self.window_length, minimum=1)


@dataclass(frozen=True, kw_only=True)
class SinkOptions(WindowOptions):
    """Options of ``cache_implementation="sink"``."""

    window_length: int = option(1020, "newest tokens that each query sees, itself included, besides the sinks")
    sink_length: int = option(4, "first tokens that every query sees")
    positions: str = option(
        "cache",
        "where the sinks stand: right before the window (cache, for models with a rotary embedding), or where they "
        "came (absolute)",
    )

    def __post_init__(self) -> None:
        """Check the lengths and the choice."""
        super().__post_init__()
        check_length("sink_length", self.sink_length)
        check_choice("positions", self.positions, POSITIONS)


class WindowLayer(SegmentedLayer):
    """One layer of the cache "window": the newest tokens in full precision."""

    Options = WindowOptions

    def __init__(self, options: WindowOptions, context: LayerContext, **sinks: Any) -> None:
        window = make_window(context, length=options.window_length, **sinks)
        super().__init__(
            options,
            context,
            sink_length=window.sink_length,
            residual_length=window.length,
            # tokens that leave are freed together, so that each costs the copy of eight that stay
            block_length=max(1, window.length // 8),
            window=window,
        )


class SinkLayer(WindowLayer):
    """One layer of the cache "sink": the first tokens and the newest, in full precision."""

    Options = SinkOptions

    def __init__(self, options: SinkOptions, context: LayerContext) -> None:
        super().__init__(options, context, sink_length=options.sink_length, positions=options.positions)
