"""The parts that a cache technique is built from."""

from .layer import KVLayer, LayerContext, StateShape, check_crop, coarsely
from .options import CacheOptions, check_choice, check_length, option
from .packed import PackedBlocks, PackedFormat, PackedStore
from .padding import Padding
from .quantizer import KVQuantizer, round_to_grid
from .rotary import Rotation, find_rotation
from .segmented import SegmentedLayer
from .view import ExactBuffers, KVHandle, KVView
from .window import Window, WindowHandle, WindowView, make_window

__all__ = [
    "CacheOptions",
    "ExactBuffers",
    "KVHandle",
    "KVLayer",
    "KVQuantizer",
    "KVView",
    "LayerContext",
    "PackedBlocks",
    "PackedFormat",
    "PackedStore",
    "Padding",
    "Rotation",
    "SegmentedLayer",
    "StateShape",
    "Window",
    "WindowHandle",
    "WindowView",
    "check_choice",
    "check_crop",
    "check_length",
    "coarsely",
    "find_rotation",
    "make_window",
    "option",
    "round_to_grid",
]
