"""`matmul` and `dequantize` against the decoded weight, over grids, shapes, dtypes and instruction sets."""

from __future__ import annotations

import copy
import io
import subprocess
import sys

import pytest
import torch
from torch import nn

import hfkv
from hfkv import kernels
from hfkv.kernels import REFERENCE, Request
from hfkv.testing.packing import poisoned
from hfkv.testing.weights import small_model
from hfkv.weights import Grid, PackedWeight
from hfkv_cpu.kernels import DENSE_ROWS, CpuKernels
from hfkv_cpu.testing import ISAS

# of float32 sums, and of rounding the output for half precision
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
LEVELS = tuple(float(level) for level in torch.linspace(-1, 1, 16) ** 3)
GRIDS = {
    "int1 affine": Grid(1, 64, affine=True),
    "int2 affine": Grid(2, 64, affine=True),
    "int2 by row": Grid(2, 10**6),
    "int3": Grid(3, 128),
    "int3 affine": Grid(3, 32, affine=True),
    "int4": Grid(4, 128),
    "int4 affine": Grid(4, 32, affine=True),
    "int4 affine in one group": Grid(4, 10**6, affine=True, per_tensor=True),
    "int4 in groups of 8": Grid(4, 8),
    "codebook of 4 bits": Grid(4, 64, levels=LEVELS),
    "codebook of 3 bits, affine": Grid(3, 64, affine=True, levels=LEVELS[:8]),
    "int8 affine": Grid(8, 64, affine=True),
    "codes of 8 bits from the middle": Grid(8, 64),
    "int8 by row": Grid(8, 10**6, numbers=torch.int8),
    "int8 in groups": Grid(8, 64, affine=True, numbers=torch.int8),
    "float8": Grid(8, 10**6, numbers=torch.float8_e4m3fn),
}
# inputs, outputs: those of SmolLM2, and what no vector divides
SHAPES = [(576, 192), (1536, 64), (576, 37), (200, 9), (37, 5), (13, 3), (8, 1), (1, 2)]


def make(grid: Grid, inputs: int, outputs: int) -> PackedWeight:
    """A weight of random codes."""
    group = inputs if grid.per_tensor else min(grid.group, inputs)
    shape = (1, 1) if grid.per_tensor else (outputs, -(-inputs // group))
    scale = torch.rand(shape).add(0.1).half()
    offset = torch.randn(shape).mul(2 ** (grid.nbits - 1)).half() if grid.affine else None
    if grid.numbers is torch.float8_e4m3fn:
        codes = torch.randn(outputs, inputs).mul(50).to(grid.numbers)
        # subnormal numbers
        codes[:, ::3] = (codes[:, ::3].float() * 2.0**-14).to(grid.numbers)
    elif grid.numbers is not None:
        codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    else:
        row_bytes = (inputs + -inputs % 8) * grid.nbits // 8
        codes = torch.randint(0, 256, (outputs, row_bytes), dtype=torch.uint8)
    return PackedWeight(grid, inputs, codes, scale, offset)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def check(states, weight, isa=None):
    """Compare with the decoded weight in float64, with fresh allocations poisoned by NaN."""
    with poisoned():
        actual = CpuKernels(isa).matmul(states, weight)
    expected = states.double() @ REFERENCE.dequantize(weight, torch.float32).double().T
    assert actual.dtype == states.dtype
    assert actual.shape == expected.shape
    # float16 ends there
    expected = expected.clamp(-65504, 65504) if states.dtype == torch.float16 else expected
    error = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error < TOLERANCE[states.dtype], error


def cases(name):
    """A weight of every shape on a grid, with each dtype."""
    for shape in SHAPES:
        weight = make(GRIDS[name], *shape)
        yield from ((weight, dtype) for dtype in TOLERANCE)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", GRIDS)
def test_product_is_that_of_the_decoded_weight(name, isa):
    for weight, dtype in cases(name):
        for rows in (1, 2, 3, 4, 7):
            check(torch.randn(rows, weight.inputs).mul(0.1).to(dtype), weight, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", GRIDS)
def test_decoded_weight_is_the_reference_s_to_the_bit(name, isa):
    for weight, dtype in cases(name):
        with poisoned():
            actual = CpuKernels(isa).dequantize(weight, dtype)
        if name == "codes of 8 bits from the middle":
            # the middle is subtracted after the product here
            torch.testing.assert_close(actual, REFERENCE.dequantize(weight, dtype), rtol=1e-2, atol=1e-4)
        else:
            assert torch.equal(actual, REFERENCE.dequantize(weight, dtype))


def test_reference_is_a_plain_product():
    weight = make(GRIDS["int4 affine"], 576, 1000)
    states = torch.randn(3, 576)
    torch.testing.assert_close(REFERENCE.matmul(states, weight), states @ REFERENCE.dequantize(weight, torch.float32).T)


@pytest.mark.parametrize("dtype", DENSE_ROWS, ids=str)
def test_many_rows_and_none(dtype):
    weight = make(GRIDS["int3 affine"], 200, 48)
    for rows in (DENSE_ROWS[dtype] - 1, DENSE_ROWS[dtype], 100):
        check(torch.randn(rows, 200).mul(0.1).to(dtype), weight)
    assert CpuKernels().matmul(torch.empty(0, 200, dtype=dtype), weight).shape == (0, 48)


def test_states_and_tensors_may_lie_anyhow():
    weight = make(GRIDS["int4 affine"], 200, 48)
    for states in (torch.randn(200, 3).T, torch.randn(3, 400)[:, ::2], torch.randn(3, 300)[:, 50:250]):
        check(states, weight)
    room = torch.empty(48, 2 * weight.codes.shape[1] + 1, dtype=torch.uint8)
    codes = room[:, 1 : 1 + weight.codes.shape[1]]
    codes.copy_(weight.codes)
    scale = weight.scale.repeat_interleave(2, dim=1)[:, ::2]
    states = torch.randn(3, 200)
    moved = PackedWeight(weight.grid, 200, codes, scale, weight.offset)
    assert torch.equal(CpuKernels().matmul(states, moved), CpuKernels().matmul(states, weight))


def test_threads_change_nothing():
    weight, states = make(GRIDS["codebook of 4 bits"], 576, 1536), torch.randn(5, 576)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append((CpuKernels().matmul(states, weight), CpuKernels().dequantize(weight, torch.bfloat16)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(product, found[0][0]) and torch.equal(dense, found[0][1]) for product, dense in found)


@pytest.mark.skipif(sys.platform != "linux", reason="protects a page with Linux's mprotect")
def test_nothing_is_read_behind_the_codes():
    """Files are mapped into memory: behind the last row there may be nothing."""
    code = """
import ctypes, mmap, torch
from hfkv.weights import Grid, PackedWeight
from hfkv_cpu.kernels import CpuKernels
from hfkv_cpu.testing import ISAS
page = mmap.PAGESIZE
room = mmap.mmap(-1, 2 * page)
start = ctypes.addressof(ctypes.c_char.from_buffer(room))
assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start + page), page, 0) == 0
for nbits in (1, 2, 3, 4, 8):
    for inputs, outputs in ((576, 3), (40, 9), (8, 2)):
        row_bytes = inputs * nbits // 8
        size = outputs * row_bytes
        codes = torch.frombuffer(room, dtype=torch.uint8, count=size, offset=page - size).view(outputs, row_bytes)
        scale = torch.ones(outputs, -(-inputs // 64), dtype=torch.float16)
        weight = PackedWeight(Grid(nbits, 64, affine=True), inputs, codes, scale, scale)
        for isa in ISAS:
            assert CpuKernels(isa).matmul(torch.ones(2, inputs), weight).eq(inputs).all()
            assert CpuKernels(isa).dequantize(weight, torch.float32).eq(1).all()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request("matmul", "cuda", torch.bfloat16, grid=Grid(4, 64)), "on the CPU"),
        (Request("matmul", "cpu", torch.float64, grid=Grid(4, 64)), "float64"),
        (Request("dequantize", "cpu", torch.float32, grid=Grid(8, 64, levels=LEVELS * 16)), "codebook of 8 bits"),
        (Request("matmul", "cpu", torch.float32, grid=Grid(8, 64, numbers=torch.float8_e5m2)), "e5m2"),
    ],
)
def test_what_is_not_supported_has_a_reason(request_, reason):
    supported, why = CpuKernels().supports(request_)
    assert not supported
    assert reason in why
    assert kernels.select(request_).name == "reference"


# in a layer


def layer_of(backend: str, **options):
    layer_class, chosen = hfkv.WeightConfig(backend, **options).choose(None)
    return layer_class.quantized(nn.Linear(576, 192), chosen)


@pytest.mark.parametrize("options", [{"quant_type": "nf4"}, {"nbits": 3}, {"nbits": 8, "granularity": "row"}])
def test_layer_uses_it_wherever_it_was_moved_or_loaded(options):
    layer = layer_of("rtn", **options)
    weight = layer.decode(torch.float32).double()
    assert layer.path() == "the product of the kernels 'cpu'"
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    loaded = layer_of("rtn", **options)
    states = torch.randn(2, 3, 576)
    loaded(states)
    loaded.load_state_dict(torch.load(io.BytesIO(buffer.getvalue())))
    assigned = layer_of("rtn", **options)
    assigned(states)
    assigned.load_state_dict(layer.state_dict(), assign=True)
    for each in (layer, loaded, assigned, copy.deepcopy(layer), copy.deepcopy(layer).share_memory()):
        for dtype in (torch.float32, torch.bfloat16):
            with torch.no_grad():
                actual = each.to(dtype)(states.to(dtype))
            expected = states.to(dtype).double() @ weight.T + each.bias.double()
            assert actual.shape == (2, 3, 192)
            assert (actual.double() - expected).norm() < TOLERANCE[dtype] * expected.norm()
        each.to(torch.float32)
    # its bytes are those of what is stored
    assert layer.stored_bytes == sum(tensor.nbytes for name, tensor in layer.state_dict().items() if name != "bias")


def test_gradients_flow_through_the_decoded_weight():
    layer = layer_of("rtn", quant_type="nf4")
    states = torch.randn(3, 576, requires_grad=True)
    layer(states).sum().backward()
    expected = layer.decode(torch.float32).sum(0).expand(3, -1)
    torch.testing.assert_close(states.grad, expected)


def test_environment_switches_it_off(monkeypatch):
    layer, states = layer_of("rtn", quant_type="nf4"), torch.randn(3, 576)
    with torch.no_grad():
        fast = layer(states)
    monkeypatch.setenv("HFKV_KERNELS", "reference")
    kernels.forget_choices()
    try:
        assert "decoded for each call, slowly" in layer.path()
        assert not layer.fast(states)
        with torch.no_grad():
            torch.testing.assert_close(layer(states), fast)
    finally:
        monkeypatch.undo()
        kernels.forget_choices()


def test_description_of_a_model_names_it():
    model = hfkv.quantize_weights(small_model(), hfkv.WeightConfig("rtn", quant_type="nf4"))
    assert "the product of the kernels 'cpu'" in str(hfkv.describe(model))


def test_compiled_layer_computes_in_plain_torch():
    layer, states = layer_of("rtn", quant_type="nf4"), torch.randn(3, 576)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(states), layer(states))
