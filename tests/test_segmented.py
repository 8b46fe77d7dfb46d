"""The segmented layer in every state: random histories against a plain tensor that went through the same."""

import copy
import pickle

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import LlamaConfig

import hfkv
from hfkv.cache.memory import tensor_bytes
from hfkv.cache.view import KVHandle

CONFIG = LlamaConfig(num_hidden_layers=1, hidden_size=48, num_attention_heads=4, num_key_value_heads=2)
HEADS, DIM = 2, 12


def make(**options):
    """A cache of one layer, with small blocks."""
    small = {"nbits": 8, "group_size": 8, "residual_length": 11, "sink_length": 3}
    return hfkv.make_cache("kivi", CONFIG, **small | options)


def random_states(batch, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, HEADS, tokens, DIM, generator=generator) for _ in range(2)]


def dense(states):
    return states.dense() if isinstance(states, KVHandle) else states


# half a step of an 8-bit grid over the widest range that a block of these numbers has, and float16's rounding of it
TOLERANCE = 10 / 255 / 2 + 0.01


class History(RuleBasedStateMachine):
    """A cache and the tensors that it should stand for."""

    @initialize(
        batch=st.integers(1, 3),
        residual=st.sampled_from([0, 1, 8, 11]),
        sink=st.sampled_from([0, 3]),
        padded=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def start(self, batch, residual, sink, padded, seed):
        self.residual, self.sink, self.seed = residual, sink, seed
        self.cache = make(residual_length=residual, sink_length=sink)
        self.expected = random_states(batch, 0, seed)
        # tokens from here on never left the residual, whatever was cropped since
        self.intact = 0
        self.padding = None
        if padded and batch > 1:
            left = torch.tensor([0, 5, 13][:batch])
            self.padding = torch.arange(20) >= left[:, None]
            self.cache.note_mask(self.padding)

    @property
    def length(self):
        return self.expected[0].shape[2]

    @property
    def layer(self):
        return self.cache.layers[0]

    @rule(tokens=st.sampled_from([1, 1, 1, 2, 7, 8, 9, 30]))
    def update(self, tokens):
        self.seed += 1
        batch = self.expected[0].shape[0]
        new = random_states(batch, tokens, self.seed)
        before = self.packed_codes()
        returned = self.cache.update(*new, 0)
        for result, past, current in zip(returned, self.expected, new, strict=True):
            # exact now: the current tokens are full precision for this forward
            torch.testing.assert_close(dense(result)[:, :, self.length :], current, rtol=0, atol=0)
            assert result.shape[2] == self.length + tokens
            assert result.dtype == past.dtype
        self.expected = [torch.cat([past, now], dim=2) for past, now in zip(self.expected, new, strict=True)]
        self.intact = max(self.intact, self.length - self.residual)
        # append-only: what was packed is not packed again
        after = self.packed_codes()
        if before is not None:
            assert torch.equal(after[:, :, : before.shape[2]], before)

    def packed_codes(self):
        packed = self.layer._packed
        return None if packed is None else packed[0].view().codes.clone()

    @rule(tokens=st.integers(0, 40))
    def crop(self, tokens):
        self.cache.crop(-tokens)
        length = max(0, self.length - tokens)
        self.expected = [states[:, :, :length] for states in self.expected]
        self.intact = min(self.intact, length)
        if self.padding is not None:
            self.padding = self.padding[:, :length] if length else None

    @rule(data=st.data())
    def reorder(self, data):
        batch = self.expected[0].shape[0]
        index = torch.tensor(data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch)))
        self.cache.reorder_cache(index)
        self.pick(index)

    @precondition(lambda self: self.length > 0)
    @rule(data=st.data())
    def select(self, data):
        batch = self.expected[0].shape[0]
        index = torch.tensor(data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=3)))
        self.cache.batch_select_indices(index)
        self.pick(index)

    @precondition(lambda self: self.length > 0 and self.expected[0].shape[0] < 3)
    @rule()
    def repeat(self):
        self.cache.batch_repeat_interleave(2)
        self.pick(torch.arange(self.expected[0].shape[0]).repeat_interleave(2))

    def pick(self, index):
        self.expected = [states[index] for states in self.expected]
        if self.padding is not None:
            self.padding = self.padding[index]

    @rule(way=st.sampled_from([copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]))
    def replace(self, way):
        old, self.cache = self.cache, way(self.cache)
        # what is done to the original must not reach the copy
        old.crop(-self.length)

    @rule()
    def offload(self):
        for layer in self.cache.layers:
            layer.offload()
            layer.prefetch()

    @rule()
    def reset(self):
        self.cache.reset()
        self.expected = [states[:, :, :0] for states in self.expected]
        self.intact, self.padding = 0, None

    @invariant()
    def same_tokens(self):
        assert self.cache.get_seq_length() == self.length
        if self.length == 0:
            assert self.layer.keys is None
            return
        real = torch.ones(self.expected[0].shape[0], self.length, dtype=torch.bool)
        if self.padding is not None:
            known = min(self.length, self.padding.shape[1])
            real[:, :known] = self.padding[:, :known]
        for stored, expected in zip((self.layer.keys, self.layer.values), self.expected, strict=True):
            assert stored.shape == expected.shape
            error = (stored - expected).abs().amax(dim=(1, 3)) * real
            assert error.max() <= TOLERANCE
            assert torch.equal(stored[:, :, self.intact :], expected[:, :, self.intact :])
            for row, mask in enumerate(real):
                first = mask.nonzero().flatten()[: self.sink]
                assert torch.equal(stored[row, :, first], expected[row, :, first])

    @invariant()
    def bounded(self):
        waiting = 0 if self.padding is None else self.padding.shape[1]
        assert self.layer._exact_length <= self.sink + self.residual + 8 + waiting

    @invariant()
    def honest_bytes(self):
        report = hfkv.memory(self.cache)
        assert report.stored_bytes == sum(tensor_bytes(self.cache).values())
        assert report.elements == sum(states.numel() for states in self.expected)


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_decoding_does_not_grow_full_precision():
    """Report: the cache grows with decoding (prefill 8, decode 500 single tokens, residual 32)."""
    cache = make(residual_length=32, sink_length=0)
    cache.update(*random_states(1, 8, 0), 0)
    for step in range(500):
        cache.update(*random_states(1, 1, step), 0)
    assert hfkv.memory(cache).full_precision_bytes <= (32 + 8) * 2 * HEADS * DIM * 4


@pytest.mark.parametrize(
    ("nbits", "axes"), [(2, ("channel", "token")), (3, ("token", "channel")), (8, ("token", "token"))]
)
def test_bytes_equal_the_formula(nbits, axes):
    cache = make(nbits=nbits, residual_length=8, sink_length=0, key_axis=axes[0], value_axis=axes[1])
    cache.update(*random_states(2, 8 * 41, 0), 0)
    report = hfkv.memory(cache)
    blocks, rows = 40, 2 * HEADS
    # a group of 8 tokens per channel, or the 12 channels in two groups of 8
    groups = {"channel": DIM, "token": 8 * 2}
    expected = sum(blocks * rows * groups[axis] * (8 * nbits // 8 + 4) for axis in axes)
    assert report.packed_bytes == expected
    assert report.full_precision_bytes == 2 * rows * (8 + 8) * DIM * 4


@pytest.mark.parametrize("tokens", [1, 5])
def test_crop_refuses_a_positive_number(tokens):
    cache = make()
    cache.update(*random_states(1, 3, 0), 0)
    with pytest.raises(ValueError, match=r"crop\(\d\): a positive number is not supported"):
        cache.crop(tokens)


def test_crop_of_more_than_there_is_empties_the_cache():
    cache = make()
    cache.update(*random_states(1, 3, 0), 0)
    cache.crop(-5)
    assert cache.get_seq_length() == 0
    cache.crop(0)
    cache.update(*random_states(1, 3, 0), 0)
    assert cache.get_seq_length() == 3


def test_left_padding_widens_no_group():
    """A row's packed tokens are the same beside its padding as on its own, but for where its blocks begin."""
    keys, values = random_states(2, 48, 0)
    padding = torch.ones(2, 48, dtype=torch.bool)
    padding[1, :19] = False
    # what padding leaves in a cache is arbitrary, and may be large
    keys[1, :, :19] *= 1e4
    values[1, :, :19] *= 1e4
    cache = make(nbits=4, sink_length=3, residual_length=0)
    cache.note_mask(padding)
    cache.update(keys, values, 0)
    error = (cache.layers[0].keys - keys)[1, :, 19:].abs().max()
    assert error < 6 / 15


def test_gradients_reach_the_current_tokens():
    cache = make(residual_length=0)
    cache.update(*random_states(1, 40, 0), 0)
    keys, values = (states.requires_grad_() for states in random_states(1, 2, 1))
    returned, _ = cache.update(keys, values, 0)
    returned.sum().backward()
    assert torch.equal(keys.grad, torch.ones_like(keys))
    assert not any(buffer.requires_grad for buffer in cache.layers[0]._exact.view())
