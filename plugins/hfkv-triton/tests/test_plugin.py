"""The plugin in its place: found, light, chosen by the op table, used by `generate`, compiled for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("triton", reason="triton is not installed")

import hfkv
from hfkv import kernels
from hfkv.cache import PackedFormat
from hfkv.kernels import Request
from hfkv_triton.kernels import INTERPRETED, TritonKernels

KEYS, VALUES = PackedFormat(4, "channel", 32, 64), PackedFormat(4, "token", 32, 64)

HIERARCHICAL = PackedFormat(8, "token", 32, 64, hierarchical=True)


def test_plugin_module_loads_neither_triton_nor_torch():
    code = "import sys, hfkv_triton.plugin; print('triton' in sys.modules, 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


@pytest.fixture
def forced(monkeypatch):
    """Ask for these kernels, as the environment does."""
    monkeypatch.setenv("HFKV_KERNELS", "triton")
    kernels.forget_choices()
    yield
    kernels.forget_choices()


@pytest.mark.parametrize(
    ("change", "supported", "reason"),
    [
        ({}, True, "Triton"),
        ({"dtype": torch.float64}, False, "float64"),
        ({"formats": (VALUES, KEYS)}, True, "Triton"),
        ({"formats": (KEYS, PackedFormat(4, "token", 64, 64))}, False, "different lengths"),
        ({"formats": (PackedFormat(4, "channel", 32, 576), VALUES)}, False, "512 channels"),
        ({"formats": (HIERARCHICAL, HIERARCHICAL)}, False, "two planes"),
        ({"formats": (HIERARCHICAL.upper_half, HIERARCHICAL.upper_half)}, True, "Triton"),
        ({"op": "pack", "formats": (KEYS,), "quantizer": "rtn"}, True, "Triton"),
        ({"op": "pack", "formats": (KEYS,), "quantizer": "hqq"}, False, "'hqq'"),
        ({"op": "unpack", "formats": (VALUES,), "dtype": torch.float16}, True, "Triton"),
    ],
)
def test_supports_gives_reasons(forced, device, change, supported, reason):
    arguments = {"op": "attend", "device": device, "dtype": torch.bfloat16, "formats": (KEYS, VALUES)}
    request = Request(**{**arguments, **change})
    answer, given = TritonKernels().supports(request)
    assert answer is supported
    assert reason in given
    chosen = next(verdict.name for verdict in kernels.explain(request) if verdict.supported)
    assert chosen == ("triton" if supported else "reference")


@pytest.mark.parametrize(
    "environment", [{}, {"TRITON_INTERPRET": "1"}, {"TRITON_INTERPRET": "1", "HFKV_KERNELS": "triton"}]
)
def test_interpreter_runs_only_where_it_is_asked_for(environment):
    """`TRITON_INTERPRET=1` is set to debug any kernel: it must not make every cache a hundred times slower."""
    code = """
import torch
from hfkv.cache import PackedFormat
from hfkv_triton.kernels import kernels
from hfkv.kernels import Request
print(*kernels.supports(Request("unpack", "cpu", torch.float32, (PackedFormat(4, "token", 32, 64),))))
"""
    clean = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "HFKV_KERNELS")}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean | environment
    )
    assert result.stdout.startswith("True" if len(environment) == 2 else "False")
    assert "TRITON_INTERPRET=1" in result.stdout or len(environment) == 2


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "hip:gfx942"])
def test_kernels_compile_for_gpus(target):
    """No GPU is needed to compile for one: what the interpreter takes, the compiler may refuse."""
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    result = subprocess.run(
        [sys.executable, str(script), target], capture_output=True, text=True, env=clean, timeout=600
    )
    assert result.returncode == 0, result.stderr[-2000:]
    # what a processor of each has: 163 KiB, 227 KiB, 64 KiB
    limit = {"cuda:80": 163, "cuda:90": 227, "hip:gfx942": 64}[target] * 1024
    sizes = [int(line.split()[-1]) for line in result.stdout.splitlines()]
    assert len(sizes) >= 4
    assert max(sizes) <= limit


def tiny_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0)).eval()


@pytest.fixture
def calls(monkeypatch, forced):
    """Counts the ops that run, by (kernels, op)."""
    counted = Counter()

    def count(owner, op):
        original = getattr(owner, op)

        def counting(self, *args, **kwargs):
            counted[self.name, op] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, op, counting)

    for owner in (TritonKernels, type(kernels.REFERENCE)):
        for op in ("pack", "unpack", "attend"):
            count(owner, op)
    return counted


OPTIONS = {"nbits": 8, "group_size": 16, "residual_length": 32}


@pytest.mark.parametrize(("dtype", "batch"), [(torch.float32, 3), (torch.bfloat16, 1)], ids=str)
def test_generate_runs_on_the_fused_path(device, calls, dtype, batch):
    model = tiny_model().to(device, dtype)
    inputs = torch.randint(1, 64, (batch, 100), device=device)
    mask = torch.ones_like(inputs)
    mask[1:, :9] = 0
    found = model.generate(
        inputs, attention_mask=mask, max_new_tokens=6, do_sample=False, return_dict_in_generate=True,
        output_logits=True, eos_token_id=None, cache_implementation="kivi", cache_config=OPTIONS,
    )  # fmt: skip
    # the prompt is attended as it is; every later step goes to the kernel, in each of two layers
    assert calls["triton", "attend"] == 5 * 2
    assert calls["triton", "pack"] > 0
    assert not any(calls["reference", op] for op in ("pack", "unpack", "attend"))
    # re-scored by the plain model: the logits that were decoded from the 8-bit cache are those of the full sequence
    full = torch.cat([mask, mask.new_ones(batch, 6)], dim=1)
    positions = (full.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        expected = model(found.sequences, attention_mask=full, position_ids=positions).logits[:, 99:-1].float()
    error = (torch.stack(found.logits, 1).float() - expected).norm() / expected.norm()
    assert error < (0.01 if dtype == torch.float32 else 0.03)


def test_multi_turn_chunks_run_on_the_fused_path(device, calls):
    model = tiny_model().to(device)
    tokens = torch.randint(1, 64, (1, 150), device=device)
    cache = hfkv.make_cache("kivi", model, **OPTIONS)
    argument = hfkv.integration.cache_argument(model)
    with torch.no_grad():
        logits = [model(part, **{argument: cache}).logits for part in tokens.split([80, 45, 1, 24], dim=1)]
        expected = model(tokens).logits
    assert calls["triton", "attend"] == 2 * 3
    assert calls["reference", "attend"] == 0
    error = (torch.cat(logits, 1) - expected).norm() / expected.norm()
    assert error < 0.01


def test_interpreter_is_in_use_only_without_a_gpu():
    """Else the tests above would say nothing of the GPU."""
    assert INTERPRETED is not torch.cuda.is_available()
