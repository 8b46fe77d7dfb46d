"""The cross-layer cache: the first layer of a group stores keys and values, the others read them.

Brandon et al., "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention", 2024.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hfkv.cache import CacheOptions, KVLayer, LayerContext, StateShape, check_choice, check_crop, check_length, option
from hfkv.cache.build import KEEP, find_technique
from hfkv.cache.memory import layer_memory, tensor_bytes

from .groups import Groups, checked, neighbours

MAPS = ("neighbours", "similar")


@dataclass(frozen=True, kw_only=True)
class CrossLayerOptions(CacheOptions):
    """Options of ``cache_implementation="crosslayer"``."""

    share: int | None = option(None, "layers per group: 2 where neither this nor groups is given")
    groups: Groups | None = option(None, "the groups themselves, e.g. [[0], [1, 2], [3, 4, 5]]; others stay alone")
    map: str = option("neighbours", "how layers are grouped: neighbours, or similar, which measures what each costs")
    store: str = option("dynamic", "the cache that stores what is shared: dynamic is transformers' own")
    store_config: Mapping[str, Any] | None = option(None, "options of the store, as for its cache_config")

    def __post_init__(self) -> None:
        """Check the values against each other, the store's options included."""
        check_choice("map", self.map, MAPS)
        if self.share is not None:
            check_length("share", self.share, minimum=1)
        if self.groups is not None and (self.share is not None or self.map != MAPS[0]):
            other = f"share={self.share!r}" if self.share is not None else f"map={self.map!r}"
            raise ValueError(f"groups={self.groups!r} says which layers share: leave out {other}")
        if self.store == KEEP:
            if self.store_config:
                raise ValueError(f"store_config={self.store_config!r}: {KEEP!r} takes no options; name a store")
            return
        given = dict(self.store_config or {})
        if "layers" in given:
            raise ValueError(
                f"store_config={given!r} has settings by layer: write them beside store, e.g. "
                "layers={'0': {'store_config': {...}}}"
            )
        if find_technique(self.store, given, "store").layer_class is CrossLayer:
            raise ValueError(f"store={self.store!r} cannot store what it shares itself: name another cache")

    def resolve(self, kinds: Mapping[int, Hashable], model: PreTrainedModel | None) -> Groups:
        """The groups of a model's layers, given the kind of each.

        Raises
        ------
        ValueError
            Groups that the layers do not allow, or ``map="similar"`` with no model or text to measure.
        """
        if self.groups is not None:
            return checked(self.groups, kinds)
        share = 2 if self.share is None else self.share
        if self.map == "similar":
            from .similar import remembered_groups

            return checked(remembered_groups(model, share), kinds)
        return neighbours(kinds, share)


class CrossLayer(KVLayer):
    """A layer that stores keys and values for a group, or one that reads them.

    Attributes
    ----------
    store
        The layer of any cache that holds the group's keys and values; None where this one borrows.
    donor
        The layer that this one reads; None where it stores.
    """

    Options = CrossLayerOptions
    options: CrossLayerOptions

    def __init__(
        self, options: CrossLayerOptions, context: LayerContext, donor: CrossLayer | None = None, borrowers: int = 0
    ) -> None:
        super().__init__(options, context)
        self.layer_idx = context.layer_idx
        self.is_sliding = getattr(context.default, "is_sliding", False)
        self.donor = donor
        self.store: Any = _make_store(options, context) if donor is None else None
        self.borrowers = borrowers
        self._return()

    @classmethod
    def takes(cls, options: CacheOptions, layer: Any) -> bool:
        """Full and sliding attention: both share, each among its own."""
        return _kind(layer) is not None

    @classmethod
    def build(cls, members: Sequence[tuple[CacheOptions, LayerContext]]) -> list[Self]:
        """The layers of one cache: those that store, and those that read them."""
        by_index: dict[int, tuple[CrossLayerOptions, LayerContext]] = {
            context.layer_idx: (options, context) for options, context in members if isinstance(options, cls.Options)
        }
        first, context = next(iter(by_index.values()))
        _check_unshared(context)
        for options, _ in by_index.values():
            if (options.share, options.groups, options.map) != (first.share, first.groups, first.map):
                raise ValueError("layers: share, groups and map are of the whole cache; write them beside layers")
        kinds = {index: _kind(its.default) for index, (_, its) in by_index.items()}
        layers: dict[int, Self] = {}
        for donor, *borrowers in first.resolve(kinds, context.model):
            layers[donor] = cls(*by_index[donor], borrowers=len(borrowers))
            for index in borrowers:
                options, its = by_index[index]
                if its.has_own_options and options != layers[donor].options:
                    raise ValueError(
                        f"layers: layer {index} stores nothing, it reads layer {donor}; give layer {donor} the options"
                    )
                layers[index] = cls(options, its, donor=layers[donor])
        _check_store(layers.values())
        return [layers[context.layer_idx] for _, context in members]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the tokens and return all; or return what the donor did, for the same tokens."""
        self.is_initialized = True
        if self.donor is not None:
            return self.donor.lend(self.layer_idx, key_states, value_states)
        states: tuple[torch.Tensor, torch.Tensor] = self.store.update(key_states, value_states, *args, **kwargs)
        # held until the last borrower has read them: what a packed store returns is whole for this forward only
        self._return()
        if self.borrowers:
            self._lent, self._tokens = states, key_states.shape[2]
        return states

    def lend(
        self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the donor returned in this forward, for a borrower in place of its own."""
        if self._lent is None or layer_idx in self._read:
            raise RuntimeError(
                f"layer {layer_idx} reads the keys and values of layer {self.layer_idx}, which has not run before it "
                "in this forward. Fix: give groups of layers that all run, each donor first"
            )
        for own, lent in zip((key_states, value_states), self._lent, strict=True):
            if (own.shape[1], own.shape[3]) != (lent.shape[1], lent.shape[3]):
                raise ValueError(
                    f"layer {layer_idx} cannot read layer {self.layer_idx}: they have {own.shape[1]} and "
                    f"{lent.shape[1]} heads of {own.shape[3]} and {lent.shape[3]} channels. Fix: put them in two groups"
                )
        states = self._lent
        self._read.add(layer_idx)
        if len(self._read) == self.borrowers:
            self._return()
        return states

    def _return(self) -> None:
        """Let go of what was lent."""
        self._lent: tuple[torch.Tensor, torch.Tensor] | None = None
        self._tokens = 0
        self._read: set[int] = set()

    @property
    def _source(self) -> Any:
        return self.store if self.donor is None else self.donor.store

    def get_seq_length(self) -> int:
        """Tokens that this layer has seen: a borrower has not seen those that its donor is still lending it."""
        length: int = self._source.get_seq_length()
        waiting = self.donor is not None and self.layer_idx not in self.donor._read
        return length - self.donor._tokens if waiting and self.donor is not None else length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that attention will see."""
        sizes: tuple[int, int] = self._source.get_mask_sizes(query_length)
        return sizes

    def dense(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """All keys and values in full precision; None while empty."""
        if isinstance(self._source, KVLayer):
            return self._source.dense()
        return None if self.get_seq_length() == 0 else (self._source.keys, self._source.values)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens."""
        check_crop(tokens_to_remove)
        if self.store is not None and self.store.is_initialized:
            self._return()
            self.store.crop(tokens_to_remove)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether the store can crop."""
        return getattr(self._source, "is_croppable", True)

    def activate_past_recording(self) -> None:
        """Let the store keep what a crop will need."""
        super().activate_past_recording()
        if hasattr(self.store, "activate_past_recording"):
            self.store.activate_past_recording()

    def steps_ahead(self) -> int | None:
        """How many tokens one forward may give so that each sees what it would alone."""
        return self._source.steps_ahead() if isinstance(self._source, KVLayer) else None

    @property
    def kept_length(self) -> int:
        """How many of the tokens seen can still be attended to: those that the store keeps."""
        return layer_memory(self._source, set()).tokens

    def attended(self, length: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What a store that forgets lets each query see."""
        return self._source.attended(length) if isinstance(self._source, KVLayer) else None

    def reset(self) -> None:
        """Forget all tokens."""
        self._return()
        self.is_initialized = False
        if isinstance(self.store, KVLayer):
            self.store.reset()
        elif self.store is not None:
            # older releases of transformers fill their layers with zeros instead of emptying them
            window = {"sliding_window": self.store.sliding_window} if self.is_sliding else {}
            self.store = type(self.store)(**window)
            if self.record_past:
                self.activate_past_recording()

    def move(self, device: torch.device) -> None:
        """Move what is stored to a device; nothing for a borrower."""
        if isinstance(self.store, KVLayer):
            self.store.move(device)
        elif self.store is not None and self.store.is_initialized:
            self.store.keys = self.store.keys.to(device, non_blocking=True)
            self.store.values = self.store.values.to(device, non_blocking=True)

    def offload(self) -> None:
        """Move what is stored to the CPU."""
        if self.store is not None and self.store.is_initialized:
            self.store.offload()

    def prefetch(self) -> None:
        """Move what is stored back to the layer's device."""
        if self.store is not None and self.store.is_initialized:
            self.store.prefetch()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the rows for beam search."""
        if self.store is not None and self.get_seq_length() > 0:
            self.store.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times."""
        if self.store is not None and self.get_seq_length() > 0:
            self.store.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows of these indices."""
        if self.store is not None and self.get_seq_length() > 0:
            self.store.batch_select_indices(indices)

    @property
    def batch_size(self) -> int:
        """Rows of the batch; AttributeError while empty, as transformers expects."""
        if isinstance(self._source, KVLayer):
            return self._source.batch_size
        if self.get_seq_length() == 0:
            raise AttributeError("batch_size is not known before the first tokens")
        return int(self._source.keys.shape[0])

    def segments(self) -> Iterator[tuple[str, int]]:
        """Yield ``(segment, bytes)`` of what is stored; nothing for a borrower."""
        if isinstance(self.store, KVLayer):
            yield from self.store.segments()
        elif self.store is not None:
            yield "exact", sum(tensor_bytes(self.store).values())

    def planned_bytes(self, tokens: int, shape: StateShape) -> int:
        """Bytes after a prompt of that many tokens; none for a borrower."""
        if isinstance(self.store, KVLayer):
            return self.store.planned_bytes(tokens, shape)
        if self.store is None:
            return 0
        if self.is_sliding:
            raise NotImplementedError("transformers' own sliding layers do not say how many bytes they will take")
        return shape.batch_size * shape.kv_heads * tokens * (shape.key_dim + shape.value_dim) * shape.itemsize

    def elements(self) -> int:
        """Numbers that the layer stands for: a borrower's are its donor's."""
        return layer_memory(self._source, set()).elements


def kinds_of(config: PretrainedConfig) -> dict[int, Hashable]:
    """The kind of each layer of a model that can share; those that cannot are left out."""
    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    kinds = {index: _kind(layer) for index, layer in enumerate(layers)}
    return {index: kind for index, kind in kinds.items() if kind is not None}


def _kind(layer: Any) -> Hashable:
    """What a layer attends to, given the layer that transformers makes for it; None where it cannot share."""
    if type(layer) is DynamicLayer:
        return ("full",)
    return ("sliding", layer.sliding_window) if type(layer) is DynamicSlidingWindowLayer else None


def _make_store(options: CrossLayerOptions, context: LayerContext) -> Any:
    if options.store == KEEP:
        return context.default
    technique = find_technique(options.store, options.store_config or {}, "store")
    if not technique.takes(context.default):
        return context.default
    (store,) = technique.layer_class.build([(technique.options, replace(context, technique=options.store))])
    return store


def _check_store(layers: Any) -> None:
    asked = {layer.options.store for layer in layers if layer.donor is None} - {KEEP}
    if asked and not any(isinstance(layer.store, KVLayer) for layer in layers):
        raise NotImplementedError(
            f"store={asked.pop()!r} works on full-attention layers, and no layer that stores is one"
        )


def _check_unshared(context: LayerContext) -> None:
    if "crosslayer" in (getattr(context.config, "hfkv", None) or {}):
        raise ValueError(
            "the layers of this model share keys and values already (hfkv_crosslayer.share): its cache is as small as "
            "'crosslayer' would make it. Use another cache, e.g. 'kivi'"
        )
