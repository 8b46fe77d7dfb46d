"""The contract of a layer's cache, and what a technique is built from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from .options import CacheOptions
from .padding import Padding


@dataclass(frozen=True)
class LayerContext:
    """Where a layer stands.

    Attributes
    ----------
    layer_idx
        The layer's index in the cache.
    config
        The decoder's (text) config; a layer reads what it needs and does not keep it.
    padding
        What the cache knows of the batch's padding; shared by all layers.
    technique
        The name of the cache, for messages.
    default
        The layer that transformers would make here.
    model
        The model that the cache is for; None where it is built from a config. Not to be kept either.
    has_own_options
        Whether ``layers`` gives this layer options of its own.
    """

    layer_idx: int
    config: PretrainedConfig
    padding: Padding
    technique: str = "cache"
    default: Any = None
    model: PreTrainedModel | None = None
    has_own_options: bool = False


@dataclass(frozen=True)
class StateShape:
    """What a layer will be handed for each token.

    Attributes
    ----------
    batch_size, kv_heads
        Rows, and heads of keys and values.
    key_dim, value_dim
        Channels of one head's keys and of its values.
    itemsize
        Bytes of a number in full precision.
    """

    batch_size: int
    kv_heads: int
    key_dim: int
    value_dim: int
    itemsize: int


class KVLayer(CacheLayerMixin):
    """One layer's keys and values; what a `CacheSpec` loads.

    A subclass sets ``Options`` and implements `update`, `get_seq_length` and `dense`; and `crop`, `map_rows` and `move`
    as far as its spec promises (``crop``; ``reorder`` and ``select``; ``offload``): what it leaves out raises
    NotImplementedError. All else follows. Shapes are ``[batch, kv_heads, tokens, head_dim]``.
    """

    Options: ClassVar[type[CacheOptions]] = CacheOptions

    is_sliding = False
    is_compileable = False

    # set while drafting (`coarsely`): attention is given the upper halves of hierarchical codes
    reads_upper_half = False

    def __init__(self, options: CacheOptions, context: LayerContext) -> None:
        # not super().__init__(), which assigns to `keys` and `values`: here they are views of what is stored
        self.options = options
        self.technique = context.technique
        self.padding = context.padding
        self.is_initialized = False
        self.record_past = False

    @classmethod
    def takes(cls, options: CacheOptions, layer: Any) -> bool:
        """Whether the technique takes the place of a layer that transformers would make: full attention by default."""
        return type(layer) is DynamicLayer

    @classmethod
    def build(cls, members: Sequence[tuple[CacheOptions, LayerContext]]) -> list[Self]:
        """The technique's layers of one cache, in order; for those that depend on one another to override."""
        return [cls(options, context) for options, context in members]

    @abstractmethod
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the current forward's tokens; return all keys and values (or their handles)."""

    @abstractmethod
    def get_seq_length(self) -> int:
        """How many tokens the layer has seen."""

    @abstractmethod
    def dense(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """All keys and values in full precision; None while empty."""

    @property
    def kept_length(self) -> int:
        """How many of the tokens seen can still be attended to: all, unless the technique forgets."""
        return self.get_seq_length()

    def attended(self, length: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What a technique that forgets lets each query of a sequence see; None: all that came before it.

        Returns
        -------
        tuple
            Both ``[length, length]``, queries by tokens: whether the query sees the token (boolean), and by how many
            positions the token stands nearer to it than it came (long). The conformance kit computes the same without a
            cache.
        """
        return None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest ``-tokens_to_remove`` tokens (zero or negative, as in transformers)."""
        raise NotImplementedError(f"the cache {self.technique!r} cannot crop: tokens stay once they are stored")

    def map_rows(self, rows: torch.Tensor) -> None:
        """Replace the batch by the rows of these indices."""
        raise NotImplementedError(f"the cache {self.technique!r} cannot reorder, select or repeat rows of its batch")

    def move(self, device: torch.device) -> None:
        """Move everything that is stored to a device."""
        raise NotImplementedError(f"the cache {self.technique!r} cannot offload: it stays on its device")

    def activate_past_recording(self) -> None:
        """From now on a crop follows each forward: what crops cannot undo may wait for it."""
        self.record_past = True

    def steps_ahead(self) -> int | None:
        """How many tokens one forward may give so that each sees what it would alone; None: any number.

        A layer that compresses as it grows changes what older tokens look like. Speculation that gives no more than
        this at once decodes what one token at a time does.
        """
        return None

    @property
    def is_hierarchical(self) -> bool:
        """Whether what is stored has a coarser view in it, to draft from."""
        return False

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether the technique implements `crop`."""
        return type(self).crop is not KVLayer.crop

    def segments(self) -> Iterator[tuple[str, int]]:
        """Yield ``(segment, bytes)`` of what is stored; ``"exact"`` is full precision, any other name is not."""
        states = self.dense()
        if states is not None:
            yield "exact", sum(state.untyped_storage().nbytes() for state in states)

    def planned_bytes(self, tokens: int, shape: StateShape) -> int:
        """Bytes that the layer will store after a prompt of that many tokens: what ``hfkv plan`` adds up.

        Raises
        ------
        NotImplementedError
            The technique's size is not known before there are tokens.
        """
        raise NotImplementedError(f"the cache {self.technique!r} does not say how many bytes it will take")

    def elements(self) -> int:
        """Numbers that the layer stands for: keys and values of all tokens."""
        states = self.dense()
        return 0 if states is None else sum(state.numel() for state in states)

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """The dequantized keys, made anew at each access."""
        states = self.dense()
        return None if states is None else states[0]

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """The dequantized values, made anew at each access."""
        states = self.dense()
        return None if states is None else states[1]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Remember the device, for `offload` and `prefetch`."""
        self.device = key_states.device
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that attention will see."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def offload(self) -> None:
        """Move what is stored to the CPU."""
        if self.is_initialized:
            self.move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move what is stored back to the layer's device."""
        if self.is_initialized:
            self.move(self.device)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the rows for beam search."""
        if self.get_seq_length() > 0:
            self.map_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times."""
        if self.get_seq_length() > 0:
            self.map_rows(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows of these indices."""
        if self.get_seq_length() > 0:
            self.map_rows(indices)

    @property
    def batch_size(self) -> int:
        """Rows of the batch.

        Raises
        ------
        AttributeError
            While empty: transformers skips layers without the attribute.
        """
        states = self.dense()
        if states is None:
            raise AttributeError("batch_size is not known before the first tokens")
        return states[0].shape[0]


@contextmanager
def coarsely(layers: Iterable[Any]) -> Iterator[None]:
    """Give attention the coarser view of hierarchical layers, for drafts; other layers are read as ever."""
    hierarchical = [layer for layer in layers if isinstance(layer, KVLayer) and layer.is_hierarchical]
    for layer in hierarchical:
        layer.reads_upper_half = True
    try:
        yield
    finally:
        for layer in hierarchical:
            layer.reads_upper_half = False


def check_crop(tokens_to_remove: int) -> int:
    """How many tokens a crop removes.

    Raises
    ------
    ValueError
        A positive number, which older releases of transformers took as the length to keep.
    """
    if tokens_to_remove > 0:
        raise ValueError(
            f"crop({tokens_to_remove}): a positive number is not supported; pass a negative one, the tokens to remove"
        )
    return -tokens_to_remove
