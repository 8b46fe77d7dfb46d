"""The KIVI cache layer.

Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", 2024. Keys have outlier channels, which
persist over tokens, so a key group runs along the tokens of one channel; values have none, and attention weighs whole
tokens, so a value group runs along the channels of one token.

Hierarchical codes: Tiwari et al., "QuantSpec: Self-Speculative Decoding with Hierarchical Quantized KV Cache", 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers.cache_utils import DynamicSlidingWindowLayer

from hfkv import registry
from hfkv.cache import (
    CacheOptions,
    KVQuantizer,
    LayerContext,
    PackedFormat,
    SegmentedLayer,
    check_choice,
    check_length,
    make_window,
    option,
)
from hfkv.cache.window import POSITIONS
from hfkv.specs import KVQuantizerSpec

WIDTHS = (2, 3, 4, 8)
AXES = ("channel", "token")


@dataclass(frozen=True, kw_only=True)
class KiviOptions(CacheOptions):
    """Options of ``cache_implementation="kivi"``."""

    spellings: ClassVar[Mapping[str, str]] = {
        "q_group_size": "group_size",
        "axis_key": "key_axis",
        "axis_value": "value_axis",
    }

    nbits: int = option(4, "bits per code of keys and values: 2, 3, 4 or 8")
    key_nbits: int | None = option(None, "bits of the keys, in place of nbits")
    value_nbits: int | None = option(None, "bits of the values, in place of nbits")
    group_size: int = option(32, "elements that share a scale and an offset, and tokens per block; a multiple of 8")
    residual_length: int = option(128, "newest tokens kept in full precision")
    sink_length: int = option(4, "first tokens kept in full precision")
    window_length: int | None = option(
        None, "newest tokens that each query sees besides the sinks; older blocks are freed (by default none is)"
    )
    positions: str | None = option(
        None, "with window_length, where the sinks stand: right before the window (cache, the default) or absolute"
    )
    quantize_sliding: bool = option(
        False, "pack the local layers of a hybrid model too, up to the newest half of their window"
    )
    backend: str = option("rtn", "the quantizer that decides codes, scale and offset")
    hierarchical: bool = option(
        False,
        "of 8-bit codes, store the upper halves apart from the lower ones: the assistant self-kv then drafts from the "
        "upper halves, 4 bits, and keeps no copy",
    )
    key_axis: str = option("channel", "what a group of keys belongs to: channel or token")
    value_axis: str = option("token", "what a group of values belongs to: channel or token")

    def __post_init__(self) -> None:
        """Check the values against each other and against what the backend can do."""
        for name in ("key_axis", "value_axis"):
            check_choice(name, getattr(self, name), AXES)
        check_length("group_size", self.group_size, multiple=8, minimum=8)
        check_length("residual_length", self.residual_length)
        check_length("sink_length", self.sink_length)
        check_choice("quantize_sliding", self.quantize_sliding, (False, True))
        self._check_window()
        spec = registry.manager().find(KVQuantizerSpec, self.backend, "backend")
        for name, value in (("nbits", self.nbits), ("key_nbits", self.key_nbits), ("value_nbits", self.value_nbits)):
            if value is not None:
                check_choice(name, value, WIDTHS)
        for name, width in (("key_nbits", self.widths[0]), ("value_nbits", self.widths[1])):
            if width not in spec.nbits:
                given = name if getattr(self, name) is not None else "nbits"
                raise ValueError(
                    f"{given}={width} is not supported by backend={self.backend!r}. Choose from: "
                    f"{', '.join(map(str, spec.nbits))}, or another backend"
                )
        check_choice("hierarchical", self.hierarchical, (False, True))
        if self.hierarchical and self.widths != (8, 8):
            raise ValueError(
                f"hierarchical=True cuts codes of 8 bits into halves, and here keys have {self.widths[0]} bits and "
                f"values {self.widths[1]}: set nbits=8, or leave hierarchical out"
            )

    def _check_window(self) -> None:
        if self.window_length is not None:
            least = self.residual_length + self.group_size
            check_length("window_length", self.window_length, minimum=1)
            if self.window_length < least:
                raise ValueError(
                    f"window_length={self.window_length} with residual_length={self.residual_length} and "
                    f"group_size={self.group_size} leaves nothing to pack: use at least {least}, or a shorter residual"
                )
        if self.positions is not None:
            check_choice("positions", self.positions, POSITIONS)
            if self.window_length is None:
                raise ValueError(f"positions={self.positions!r} is about a window: set window_length, or leave it out")

    @property
    def widths(self) -> tuple[int, int]:
        """Bits of keys and of values."""
        return self.key_nbits or self.nbits, self.value_nbits or self.nbits

    @classmethod
    def translate(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Take a ``cache_config`` that was written for transformers' "quantized" cache.

        ``q_group_size`` is ``group_size``; ``axis_key`` and ``axis_value`` are numbers whose meaning depends on the
        backend, and which its plugin spells out. None is the default, as it is there.
        """
        result = {name: value for name, value in given.items() if value is not None}
        backend = result.get("backend", "rtn")
        for theirs, ours in cls.spellings.items():
            if theirs not in result:
                continue
            if ours in result:
                raise ValueError(f"{theirs} and {ours} are two spellings of one option: pass one of them")
            value = result.pop(theirs)
            if theirs != "q_group_size":
                names = registry.manager().find(KVQuantizerSpec, backend, "backend").axis_names
                check_choice(theirs, value, tuple(names))
                value = names[value]
            result[ours] = value
        return result


class KiviLayer(SegmentedLayer):
    """One layer of the KIVI cache: ``[ sink | packed blocks | residual ]``."""

    Options = KiviOptions
    options: KiviOptions

    def __init__(self, options: KiviOptions, context: LayerContext) -> None:
        sinks, residual, window = options.sink_length, options.residual_length, None
        if isinstance(context.default, DynamicSlidingWindowLayer):
            # a local layer loses its first tokens with or without us
            sinks, window = 0, make_window(context, length=context.default.sliding_window)
            residual = min(residual, window.length // 2)
        elif options.window_length is not None:
            positions = options.positions or "cache"
            window = make_window(context, length=options.window_length, sink_length=sinks, positions=positions)
        super().__init__(
            options,
            context,
            sink_length=sinks,
            residual_length=residual,
            block_length=options.group_size,
            window=window,
        )
        if options.hierarchical and self.quantizer.codebook(8) is not None:
            raise ValueError(
                f"hierarchical=True needs the codes of a uniform grid, and those of backend={options.backend!r} stand "
                "for levels of a codebook: choose another backend, or leave hierarchical out"
            )

    @classmethod
    def takes(cls, options: CacheOptions, layer: Any) -> bool:
        """Full attention, and local layers where they are asked for."""
        assert isinstance(options, KiviOptions)
        return super().takes(options, layer) or (options.quantize_sliding and type(layer) is DynamicSlidingWindowLayer)

    def make_quantizer(self) -> KVQuantizer:
        """The backend's quantizer."""
        quantizer: KVQuantizer = registry.find(KVQuantizerSpec, self.options.backend, "backend")()
        return quantizer

    @property
    def is_hierarchical(self) -> bool:
        """Whether the codes are stored in halves."""
        return self.options.hierarchical

    def key_format(self, head_dim: int) -> PackedFormat:
        """Keys: per channel by default."""
        return self._format(self.options.widths[0], self.options.key_axis, head_dim)

    def value_format(self, head_dim: int) -> PackedFormat:
        """Values: per token by default."""
        return self._format(self.options.widths[1], self.options.value_axis, head_dim)

    def _format(self, nbits: int, axis: Any, head_dim: int) -> PackedFormat:
        options = self.options
        codebook = self.quantizer.codebook(nbits)
        return PackedFormat(nbits, axis, options.group_size, head_dim, codebook, options.hierarchical)
