"""What a segmented layer stores: tokens in full precision at both ends, whole packed blocks in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .. import integration, kernels
from .exact import ExactStore
from .layer import KVLayer, LayerContext, StateShape, check_crop
from .options import CacheOptions
from .packed import PackedFormat, PackedStore
from .padding import without_padding
from .quantizer import KVQuantizer
from .view import KVView
from .window import RECORDED, Window


class Segments(KVLayer):
    """``[ sink | packed blocks | residual ]`` in token order; a block is packed once, when it leaves the residual.

    The exact tokens (sink, then residual) share one store with room for one block more than the residual, so a decode
    step writes one token in place, and every ``block_length`` steps one block is packed. With a window, what is behind
    it (sinks excepted) is freed, block by block.

    Subclasses say how keys and values are packed with `key_format`, `value_format` and `make_quantizer`; without a
    quantizer nothing is packed, and the residual is the window.
    """

    def __init__(
        self,
        options: CacheOptions,
        context: LayerContext,
        *,
        sink_length: int,
        residual_length: int,
        block_length: int,
        window: Window | None = None,
    ) -> None:
        super().__init__(options, context)
        if window is not None:
            integration.require_attention(self.technique, context.model)
        self.sink_length = sink_length
        self.residual_length = residual_length
        self.block_length = block_length
        self.window = window
        self.is_sliding = getattr(context.default, "is_sliding", False)
        self.quantizer = self.make_quantizer()
        self._clear()

    def make_quantizer(self) -> KVQuantizer | None:
        """The rule for codes, scale and offset; None packs nothing."""
        return None

    def key_format(self, head_dim: int) -> PackedFormat:
        """How keys of this many channels are packed."""
        raise NotImplementedError

    def value_format(self, head_dim: int) -> PackedFormat:
        """How values of this many channels are packed."""
        raise NotImplementedError

    def _clear(self) -> None:
        self._exact: ExactStore | None = None
        self._packed: tuple[PackedStore, PackedStore] | None = None
        self._order: torch.Tensor | None = None
        self._unsettled = False
        # tokens between the sinks and what follows them that were freed
        self._dropped = 0
        # tokens since the last crop, which another one may take back
        self._uncropped = 0
        self.is_initialized = False

    @property
    def _exact_length(self) -> int:
        return 0 if self._exact is None else self._exact.length

    @property
    def _packed_length(self) -> int:
        return 0 if self._packed is None else self._packed[0].length

    def get_seq_length(self) -> int:
        """Tokens seen: those of all segments, and those that a window has left behind."""
        return self._exact_length + self._packed_length + self._dropped

    @property
    def kept_length(self) -> int:
        """Tokens that can still be attended to."""
        seen = self.get_seq_length()
        return seen if self.window is None else self.window.kept(seen)

    @property
    def batch_size(self) -> int:
        """Rows of the batch; AttributeError while empty, as transformers expects."""
        if self._exact is None:
            raise AttributeError("batch_size is not known before the first tokens")
        return self._exact.keys.shape[0]

    @property
    def _is_split(self) -> bool:
        """Whether the sinks have been set apart, and with them the order of the first tokens."""
        return self._packed is not None or self._dropped > 0

    def _exact_states(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self._exact is None else self._exact.view()

    @property
    def _recorded(self) -> int:
        """Tokens behind the window that a crop may bring back into it."""
        return min(self._uncropped, RECORDED) if self.record_past else 0

    @property
    def _room(self) -> int:
        recorded = RECORDED if self.record_past and self.quantizer is None else 0
        return self.sink_length + self.residual_length + self.block_length + recorded

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self._exact is None:
            self._exact = ExactStore(key_states, value_states)
        else:
            self._exact.append(key_states, value_states)

    def _settle(self) -> None:
        """Pack what has left the residual, and hold the rest in buffers of our own."""
        self._unsettled = False
        assert self._exact is not None
        if not self._pack() and self._exact.room != self._room:
            # the model's own tensors, or a joined run of unusual length
            self._exact.cut(0, 0, self._room)

    def _view(self) -> KVView:
        assert self._exact is not None and self._packed is not None
        # the tokens that moved to make room for sinks are among the first to be dropped
        order = None if self._dropped else self._order
        keys, values = (store.view() for store in self._packed)
        return KVView(self._exact.buffers, self._exact.length, self.sink_length, keys, values, order)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """All keys and values that are kept, in full precision; None while empty."""
        if self._exact is None or not self._packed_length:
            return self._exact_states()
        view = self._view()
        return view.dense("keys"), view.dense("values")

    def _pack(self) -> bool:
        """Pack the whole blocks between the sink and the residual, and free those behind the window.

        Says whether the exact tokens are others than before.
        """
        residual = self.residual_length + (self._recorded if self.quantizer is None else 0)
        count = max(0, (self._exact_length - self.sink_length - residual) // self.block_length)
        behind = self._blocks_behind()
        if count == behind == 0:
            return False
        assert self._exact is not None
        if not self._is_split:
            order = self.padding.order(self.sink_length)
            if order is not None and order.shape[1] > self._exact_length:
                # a chunk of padding came first: wait until every row's sinks are there
                return False
            self._order = None if order is None else order.to(self.device)
            self._exact.reorder(self._order)
        behind -= self._free(behind)
        # a long prompt's oldest blocks are freed unpacked
        begin = self.sink_length + min(behind, count) * self.block_length
        end = self.sink_length + count * self.block_length
        self._dropped += begin - self.sink_length
        if self.quantizer is not None and end > begin:
            self._encode(begin, end)
        if count:
            # new buffers, not a move in place: what attention was handed stays as it is
            self._exact.cut(self.sink_length, end, self._room)
        return count > 0

    def _blocks_behind(self) -> int:
        """How many of the oldest blocks no query will see any more."""
        if self.window is None:
            return 0
        oldest = self.get_seq_length() - self.window.length - self._recorded
        return max(0, oldest - self.sink_length - self._dropped) // self.block_length

    def _free(self, count: int) -> int:
        """Free packed blocks, ``count`` at most; say how many."""
        if self._packed is None:
            return 0
        count = min(count, self._packed[0].count)
        for store in self._packed:
            store.free(count)
        self._dropped += count * self.block_length
        return count

    def _encode(self, begin: int, end: int) -> None:
        """Pack the exact tokens from ``begin`` to ``end``."""
        assert self.quantizer is not None and self._exact is not None
        exact = self._exact.keys, self._exact.values
        if self._packed is None:
            self._packed = self._new_store(self.key_format, exact[0]), self._new_store(self.value_format, exact[1])
        start = self.sink_length + self._dropped + self._packed_length
        real = self.padding.real(start, start + end - begin, self._order)
        for store, states in zip(self._packed, exact, strict=True):
            leaving = states[:, :, begin:end]
            if real is not None:
                leaving = without_padding(leaving, real.to(leaving.device), self.block_length)
            store.extend(kernels.pack(leaving, store.format, self.quantizer))

    @staticmethod
    def _new_store(format_of: Callable[[int], PackedFormat], states: torch.Tensor) -> PackedStore:
        return PackedStore(format_of(states.shape[3]), states.shape[0], states.shape[1], states.device)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens; exact within the residual, else the block that is cut is unpacked.

        Raises
        ------
        ValueError
            Older tokens would come back into the window, and they are gone.
        """
        remove = min(check_crop(tokens_to_remove), self.get_seq_length())
        length = self.get_seq_length() - remove
        if remove:
            self._check_window(length)
            self._remove(remove, length)
        self._uncropped = 0
        if self._exact is not None and (self._unsettled or self._blocks_behind()):
            # what was kept for this crop
            self._settle()

    def _check_window(self, length: int) -> None:
        slots = 0 if self._order is None else self._order.shape[1]
        if self.window is None or not self._dropped or not length:
            return
        oldest = self.sink_length + self._dropped
        if length < slots or length - self.window.length + 1 < oldest:
            raise ValueError(
                f"crop: with {length} of {self.get_seq_length()} tokens left, the window of {self.window.length} would "
                f"reach back to tokens that {self.technique!r} has freed (the oldest left is {oldest}). Fix: call "
                f"cache.activate_past_recording() before the tokens that may be taken back, {RECORDED} at most"
            )

    def _remove(self, remove: int, length: int) -> None:
        if length == 0:
            self._clear()
        elif self._packed is None or remove <= self._exact_length - self.sink_length:
            assert self._exact is not None
            self._exact.length -= remove
        elif length < max(self.sink_length, 0 if self._order is None else self._order.shape[1]):
            self._unpack_all(length)
        else:
            self._cut(length)

    def _unpack_all(self, length: int) -> None:
        """Hold the first tokens in full precision again, in token order."""
        states = self.dense()
        assert states is not None
        device = self.device
        self._clear()
        self.device, self.is_initialized = device, True
        self._exact = ExactStore(states[0][:, :, :length], states[1][:, :, :length])
        self._exact.cut(0, 0, self._room)

    def _cut(self, length: int) -> None:
        """Drop blocks; the tokens that are left of a cut one become the residual."""
        assert self._exact is not None and self._packed is not None
        count, rest = divmod(length - self.sink_length - self._dropped, self.block_length)
        for buffer, store in zip((self._exact.keys, self._exact.values), self._packed, strict=True):
            if rest:
                tokens = kernels.unpack(store.view().narrow(count, 1), buffer.dtype)
                # this block's tokens need no more room than one block, which the buffer always has
                buffer[:, :, self.sink_length : self.sink_length + rest] = tokens[:, :, :rest]
            store.truncate(count)
        self._exact.length = self.sink_length + rest
        if count == 0 and not self._dropped and self._order is None:
            self._packed = None
        elif count == 0 and not self._dropped:
            self._unpack_all(length)

    def map_rows(self, rows: torch.Tensor) -> None:
        """Replace the batch by the rows of these indices."""
        self._map(lambda tensor: tensor[rows.to(tensor.device)])

    def move(self, device: torch.device) -> None:
        """Move everything that is stored to a device."""
        self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self._exact is None:
            return
        self._exact.map(function)
        for store in self._packed or ():
            store.map(function)
        if self._order is not None:
            self._order = function(self._order)

    def reset(self) -> None:
        """Forget all tokens."""
        self._clear()

    def segments(self) -> Iterator[tuple[str, int]]:
        """Yield ``(segment, bytes)`` of what is stored, room to grow included."""
        if self._exact is not None:
            yield "exact", self._exact.nbytes
        if self._packed is not None:
            yield "packed", sum(store.nbytes for store in self._packed)

    def planned_bytes(self, tokens: int, shape: StateShape) -> int:
        """Bytes after a prompt of that many tokens; a cache that grew to it has the room of `PackedStore` besides."""
        blocks = max(0, (tokens - self.sink_length - self.residual_length) // self.block_length)
        exact = max(tokens - blocks * self.block_length, self._room) if tokens else 0
        per_head = exact * (shape.key_dim + shape.value_dim) * shape.itemsize
        if self.quantizer is not None:
            behind = 0 if self.window is None else max(0, tokens - self.sink_length - self.window.length)
            packed = self.key_format(shape.key_dim).block_bytes + self.value_format(shape.value_dim).block_bytes
            per_head += max(0, blocks - behind // self.block_length) * packed
        return shape.batch_size * shape.kv_heads * per_head

    def elements(self) -> int:
        """Numbers that the layer stands for: keys and values of all tokens that are kept."""
        return 0 if self._exact is None else self._exact.token_elements * self.kept_length
