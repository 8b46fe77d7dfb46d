"""The plugin in its place: found, light, chosen by the op table, and used by every forward of `generate`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hfkv
from hfkv import kernels
from hfkv.cache import PackedFormat
from hfkv.kernels import Request
from hfkv_cpu.kernels import CpuKernels
from hfkv_cpu.testing import ISAS

KEYS, VALUES = PackedFormat(4, "channel", 32, 64), PackedFormat(4, "token", 32, 64)


def test_plugin_module_does_not_load_the_extension():
    code = "import sys, hfkv_cpu.plugin; print('hfkv_cpu._kernels' in sys.modules, 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("request_", "supported"),
    [
        (Request("attend", "cpu", torch.float32, (KEYS, VALUES)), True),
        (Request("attend", "cpu", torch.bfloat16, (VALUES, KEYS)), True),
        (Request("attend", "cuda", torch.bfloat16, (KEYS, VALUES)), False),
        (Request("attend", "cpu", torch.float64, (KEYS, VALUES)), False),
        (Request("attend", "cpu", torch.float32, (KEYS, PackedFormat(4, "token", 64, 64))), False),
        (Request("pack", "cpu", torch.float32, (KEYS,), "rtn"), True),
        (Request("pack", "cpu", torch.float32, (KEYS,), "hqq"), False),
        (Request("unpack", "cpu", torch.float16, (VALUES,)), True),
    ],
)
def test_supports_gives_reasons(request_, supported):
    answer, reason = CpuKernels().supports(request_)
    assert answer is supported
    assert reason
    verdicts = {verdict.name: verdict for verdict in kernels.explain(request_)}
    assert verdicts["cpu"].supported is supported
    chosen = next(verdict.name for verdict in kernels.explain(request_) if verdict.supported)
    assert chosen == ("cpu" if supported else "reference")


def test_unknown_instruction_set_is_refused():
    with pytest.raises(ValueError, match=r"HFKV_CPU_ISA='mmx'.*portable"):
        CpuKernels("mmx")


def test_environment_chooses_the_instruction_set():
    isa = ISAS[-1]
    assert CpuKernels().isa == ISAS[0]
    code = "from hfkv_cpu.kernels import kernels; print(kernels.isa)"
    env = {**os.environ, "HFKV_CPU_ISA": isa}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert result.stdout.strip() == isa


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch's threads are not OpenMP's of GCC")
def test_threads_are_those_of_torch():
    assert "openmp" in CpuKernels().supports(Request("attend", "cpu", torch.float32, (KEYS, VALUES)))[1]


def test_a_forked_process_attends():
    """Worker processes of data loaders are forked, after torch has started threads."""
    code = """
import os, torch
from hfkv_cpu.kernels import CpuKernels
from hfkv_cpu.testing import make_view
torch.set_num_threads(2)
view, query = make_view(blocks=64, head_dim=128), torch.randn(1, 8, 1, 128)
expected, _ = CpuKernels().attend(query, view, None, 0.1, False)
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    found, _ = CpuKernels().attend(query, view, None, 0.1, False)
    os._exit(0 if torch.allclose(found, expected, atol=1e-5) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "0"


def tiny_model(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes}, pad_token_id=0)).eval()


@pytest.fixture
def calls(monkeypatch):
    """Counts the ops that run, by (kernels, op), and the queries of every attend."""
    counted = Counter()

    def count(owner, op):
        original = getattr(owner, op)

        def counting(self, *args, **kwargs):
            counted[self.name, op] += 1
            if op == "attend":
                counted["queries", args[0].shape[2]] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, op, counting)

    for owner in (CpuKernels, type(kernels.REFERENCE)):
        for op in ("pack", "unpack", "attend"):
            count(owner, op)
    return counted


OPTIONS = {"nbits": 8, "group_size": 16, "residual_length": 32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_generate_runs_on_the_fused_path(calls, dtype, batch):
    model = tiny_model().to(dtype)
    inputs = torch.randint(1, 64, (batch, 100))
    mask = torch.ones_like(inputs)
    mask[1:, :9] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    found = model.generate(
        inputs, **arguments, cache_implementation="kivi", cache_config=OPTIONS, output_logits=True, eos_token_id=None
    )
    # the prompt is attended as it is; every later step goes to the kernel, in each of two layers
    assert calls["cpu", "attend"] == calls["queries", 1] == 29 * 2
    assert calls["cpu", "pack"] > 0
    assert not any(calls["reference", op] for op in ("pack", "unpack", "attend"))
    assert calls["cpu", "unpack"] == 0
    # re-scored by the plain model: the logits that were decoded from the 8-bit cache are those of the full sequence
    full = torch.cat([mask, mask.new_ones(batch, 30)], dim=1)
    positions = (full.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        expected = model(found.sequences, attention_mask=full, position_ids=positions).logits[:, 99:-1].float()
    error = (torch.stack(found.logits, 1).float() - expected).norm() / expected.norm()
    assert error < (0.01 if dtype == torch.float32 else 0.03)


def test_assisted_decoding_verifies_on_the_fused_path(calls):
    model = tiny_model()
    inputs = torch.randint(1, 64, (1, 8)).repeat(1, 16)
    arguments = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    # on random weights prompt lookup guesses badly, so that candidates are rejected and the cache is cropped too
    found = model.generate(
        inputs, **arguments, prompt_lookup_num_tokens=5, cache_implementation="kivi", cache_config=OPTIONS
    )
    chunks = {key[1]: count for key, count in calls.items() if key[0] == "queries"}
    assert sum(count for queries, count in chunks.items() if queries > 1) > 0
    assert calls["cpu", "attend"] == sum(chunks.values())
    assert calls["reference", "attend"] == 0
    assert calls["reference", "unpack"] == 0
    plain = model.generate(inputs, **arguments, cache_implementation="kivi", cache_config=OPTIONS)
    assert torch.equal(found, plain)


def test_multi_turn_chunks_run_on_the_fused_path(calls):
    model = tiny_model()
    tokens = torch.randint(1, 64, (1, 300))
    cache = hfkv.make_cache("kivi", model, **OPTIONS)
    argument = hfkv.integration.cache_argument(model)
    with torch.no_grad():
        logits = [model(part, **{argument: cache}).logits for part in tokens.split([120, 97, 1, 82], dim=1)]
        expected = model(tokens).logits
    assert calls["cpu", "attend"] == 2 * 3
    assert calls["reference", "attend"] == 0
    error = (torch.cat(logits, 1) - expected).norm() / expected.norm()
    assert error < 0.01


def test_reference_can_be_forced(monkeypatch, calls):
    monkeypatch.setenv("HFKV_KERNELS", "reference")
    kernels.forget_choices()
    try:
        tiny_model().generate(
            torch.randint(1, 64, (1, 100)), max_new_tokens=3, cache_implementation="kivi", cache_config=OPTIONS
        )
    finally:
        kernels.forget_choices()
    assert calls["reference", "attend"] > 0
    assert calls["cpu", "attend"] == 0
