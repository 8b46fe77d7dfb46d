"""The quantizer "quanto" does what optimum-quanto does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from optimum.quanto import AbsmaxOptimizer, MaxOptimizer, qint8, quantize_weight

import hfkv
from hfkv import registry
from hfkv_quanto.kv import QTYPES, QuantoKVQuantizer

GROUP = 32


def exact_groups(nbits, symmetric=False):
    """Groups whose grid float16 holds exactly, with no element half-way between two levels."""
    generator = torch.Generator().manual_seed(0)
    top = 2**nbits - 1
    scale = torch.randint(1, 1024, (200, 1), generator=generator) / 256
    offset = torch.randint(-500, 500, (200, 1), generator=generator) / 8
    thirds = torch.randint(0, 3 * top + 1, (200, GROUP), generator=generator)
    thirds[:, 0], thirds[:, 1] = 0, 3 * top
    if symmetric:
        # codes from 1 on: the largest magnitude is 127 scales, and -128 is not used
        thirds = thirds.clamp_min(3)
        offset = -128 * scale
    return thirds / 3 * scale + offset


def restored(groups, nbits):
    codes, scale, offset = QuantoKVQuantizer().quantize(groups, nbits)
    return codes * scale.float()[:, None] + offset.float()[:, None]


@pytest.mark.parametrize("nbits", [2, 4])
def test_equals_the_library_at_2_and_4_bits(nbits):
    groups = exact_groups(nbits)
    scale, shift = MaxOptimizer()(groups, QTYPES[nbits], axis=0)
    expected = quantize_weight(groups, QTYPES[nbits], 0, scale, shift).dequantize()
    torch.testing.assert_close(restored(groups, nbits), expected, rtol=1e-6, atol=1e-4)


def test_equals_the_library_at_8_bits():
    groups = exact_groups(8, symmetric=True)
    expected = quantize_weight(groups, qint8, 0, AbsmaxOptimizer()(groups, qint8, axis=0)).dequantize()
    torch.testing.assert_close(restored(groups, 8), expected, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("nbits", [2, 4, 8])
def test_float16_costs_little_where_it_cannot_hold_the_grid(nbits):
    groups = torch.randn(500, GROUP, generator=torch.Generator().manual_seed(0))
    if nbits == 8:
        scale, shift = AbsmaxOptimizer()(groups, qint8, axis=0), None
    else:
        scale, shift = MaxOptimizer()(groups, QTYPES[nbits], axis=0)
    expected = quantize_weight(groups, QTYPES[nbits], 0, scale, shift).dequantize()
    ours, theirs = ((other - groups).abs().mean().item() for other in (restored(groups, nbits), expected))
    assert ours == pytest.approx(theirs, rel=0.02)


@pytest.mark.parametrize("nbits", [2, 4])
def test_codes_are_those_of_rtn_at_2_and_4_bits(nbits):
    rtn = registry.find(hfkv.KVQuantizerSpec, "rtn", "backend")()
    groups = torch.randn(500, GROUP, generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(QuantoKVQuantizer().quantize(groups, nbits), rtn.quantize(groups, nbits), strict=True):
        assert torch.equal(ours, theirs)


def test_a_single_group_is_one_group():
    # the library's call takes one row for as many groups as it has elements
    groups = torch.linspace(-1, 2, GROUP)[None]
    codes, scale, offset = QuantoKVQuantizer().quantize(groups, 4)
    assert scale.tolist() == [pytest.approx(3 / 15, rel=1e-3)]
    assert offset.tolist() == [-1]
    assert (codes.min(), codes.max()) == (0, 15)


IMPORT_AND_PACK = """
import sys
import warnings

import torch
import transformers.cache_utils
import hfkv.cache

sys.dont_write_bytecode = True
warnings.simplefilter("error")
FORBIDDEN = "subprocess.Popen os.posix_spawn os.exec os.fork os.system socket.connect socket.getaddrinfo".split()


def refuse(event, arguments):
    written = event == "open" and isinstance(arguments[2], int) and arguments[2] & 3
    if event in FORBIDDEN or written:
        raise RuntimeError(f"{event}: {arguments}")


sys.addaudithook(refuse)
from hfkv_quanto.kv import QuantoKVQuantizer

for nbits in (2, 4, 8):
    QuantoKVQuantizer().quantize(torch.randn(10, 32), nbits)
print("done")
"""


def test_library_compiles_downloads_and_warns_of_nothing():
    run = subprocess.run([sys.executable, "-c", IMPORT_AND_PACK], check=True, capture_output=True, text=True)
    assert run.stdout == "done\n"
