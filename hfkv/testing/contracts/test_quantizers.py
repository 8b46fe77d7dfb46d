"""What every KV quantizer owes the cache: codes, scales and offsets that come back, group by group."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from hfkv import kernels
from hfkv.cache import PackedFormat
from hfkv.kernels import reference
from hfkv.testing.cases import QuantizerCase

Axis = Literal["channel", "token"]
every_axis = pytest.mark.parametrize("axis", ["channel", "token"])

TOKENS, HEAD_DIM, GROUP = 64, 32, 32
SHAPE = (1, 2, TOKENS, HEAD_DIM)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, the same ones for every quantizer."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def restore(states: torch.Tensor, case: QuantizerCase, axis: Axis) -> torch.Tensor:
    """What packing makes of ``[batch, kv_heads, tokens, head_dim]``."""
    format = PackedFormat(case.nbits, axis, GROUP, states.shape[-1], case.make().codebook(case.nbits))
    return kernels.unpack(reference.ReferenceKernels().pack(states, format, case.make()), torch.float32)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, as near as float16 and a code of 8 bits can be."""
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-22)


@every_axis
def test_error_falls_with_every_bit(hfkv_quantizer: QuantizerCase, axis: Axis) -> None:
    """Twice the levels, half the error."""
    states = normal(*SHAPE)
    # the range of a group of 32 normal numbers is about 4, and a symmetric grid may waste a bit of it
    assert (restore(states, hfkv_quantizer, axis) - states).abs().mean() < 4 / 2**hfkv_quantizer.nbits / 2


@every_axis
@pytest.mark.parametrize("value", [0.0, 1.0, -3.3, 700.0])
def test_constant_groups_come_back(hfkv_quantizer: QuantizerCase, axis: Axis, value: float) -> None:
    """A group without a range has a scale above zero, and is restored."""
    states = torch.full(SHAPE, value)
    # kernels divide by the scale, or fold it into what they multiply
    assert (hfkv_quantizer.make().quantize(states, hfkv_quantizer.nbits)[1] > 0).all()
    assert_near(restore(states, hfkv_quantizer, axis), states)


@every_axis
def test_ranges_below_float16_come_back(hfkv_quantizer: QuantizerCase, axis: Axis) -> None:
    """A channel that varies by a billionth neither becomes NaN nor moves."""
    states = normal(*SHAPE)
    states[..., 3] = 0.25 + 1e-9 * states[..., 3]
    states[..., 4] = 1e-9 * states[..., 4]
    states[0, 0, 40:] = 1e-9 * states[0, 0, 40:]
    restored = restore(states, hfkv_quantizer, axis)
    assert restored.isfinite().all()
    if axis == "channel":
        assert_near(restored[:, 1, :, 3:5], states[:, 1, :, 3:5])


@every_axis
def test_ranges_above_float16_stay_finite(hfkv_quantizer: QuantizerCase, axis: Axis) -> None:
    """What float16 cannot hold is clamped, and nothing but its own group suffers."""
    states = normal(*SHAPE, dtype=torch.bfloat16)
    states[0, 1, 5, 7] = 1e5
    states[0, 0, 6, 8] = -1e5
    restored = restore(states, hfkv_quantizer, axis)
    assert restored.isfinite().all()
    plain = restore(states.clamp(-6, 6), hfkv_quantizer, axis)
    far = (slice(None), slice(None), slice(GROUP, None), slice(9, None))
    assert torch.equal(restored[far], plain[far])
    assert restored[0, 1, 5, 7] > 3e4
    assert restored[0, 0, 6, 8] < -3e4


@every_axis
def test_rows_do_not_depend_on_their_neighbours(hfkv_quantizer: QuantizerCase, axis: Axis) -> None:
    """A row is the same alone and beside rows 20 times larger."""
    row, large = normal(*SHAPE, seed=1), 20 * normal(*SHAPE, seed=2)
    alone = restore(row, hfkv_quantizer, axis)
    assert torch.equal(alone, restore(torch.cat([large, row, large]), hfkv_quantizer, axis)[1:2])


@every_axis
def test_blocks_do_not_depend_on_what_is_packed_with_them(
    hfkv_quantizer: QuantizerCase, axis: Axis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt packed at once is what it is packed block by block, and in smaller chunks."""
    states = normal(2, 2, 5 * GROUP, HEAD_DIM)
    together = restore(states, hfkv_quantizer, axis)
    assert torch.equal(together, restore(states, hfkv_quantizer, axis))
    one_by_one = [restore(block, hfkv_quantizer, axis) for block in states.split(GROUP, dim=2)]
    assert torch.equal(together, torch.cat(one_by_one, dim=2))
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 1)
    assert torch.equal(together, restore(states, hfkv_quantizer, axis))


def test_a_single_group_and_every_group_size(hfkv_quantizer: QuantizerCase) -> None:
    """Codes are uint8 within the width, scales and offsets float16, one of each for a group."""
    nbits = hfkv_quantizer.nbits
    row = torch.linspace(-1, 2, 128)
    for group in (8, 24, 32, 128):
        codes, scale, offset = hfkv_quantizer.make().quantize(row[:group].view(1, group), nbits)
        assert (codes.shape, codes.dtype) == ((1, group), torch.uint8)
        assert (scale.shape, scale.dtype, offset.dtype) == ((1,), torch.float16, torch.float16)
        assert codes.max() <= 2**nbits - 1
        levels = _levels(hfkv_quantizer, scale, offset)[0]
        assert (levels[codes[0].long()] - row[:group]).abs().max() < 3 / (2**nbits - 1)


def test_codes_are_the_nearest_on_the_stored_grid(hfkv_quantizer: QuantizerCase) -> None:
    """Codes are chosen after scale and offset were rounded to float16, not before."""
    states = normal(500, GROUP)
    codes, scale, offset = hfkv_quantizer.make().quantize(states, hfkv_quantizer.nbits)
    levels = _levels(hfkv_quantizer, scale, offset)
    nearest = (states[..., None] - levels[:, None, :]).abs().amin(-1)
    chosen = (states - levels.gather(1, codes.long())).abs()
    torch.testing.assert_close(chosen, nearest, rtol=0, atol=1e-5)


def test_input_is_left_as_it_was(hfkv_quantizer: QuantizerCase) -> None:
    """What is packed may be what attention reads in the same forward."""
    states = normal(10, GROUP)
    before = states.clone()
    hfkv_quantizer.make().quantize(states, hfkv_quantizer.nbits)
    assert torch.equal(states, before)


def test_inference_mode_changes_nothing(hfkv_quantizer: QuantizerCase) -> None:
    """`generate` packs in inference mode, a training loop outside of it."""
    states = normal(*SHAPE)
    with torch.inference_mode():
        inside = restore(states, hfkv_quantizer, "channel")
    assert torch.equal(inside, restore(states, hfkv_quantizer, "channel"))


def test_declared_widths_are_those_of_the_storage(hfkv_quantizer: QuantizerCase) -> None:
    """Codes of 2, 3, 4 and 8 bits can be packed."""
    assert set(hfkv_quantizer.spec.nbits) <= {2, 3, 4, 8}


def _levels(case: QuantizerCase, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """``[groups, levels]``: the numbers that each group's codes stand for."""
    codebook = case.make().codebook(case.nbits)
    steps = torch.arange(2**case.nbits).float() if codebook is None else torch.tensor(codebook)
    return steps * scale.float()[:, None] + offset.float()[:, None]
