"""Which way quantized layers compute: what is reported is what happens, and nothing needs a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import hfkv
from hfkv import kernels
from hfkv.testing.cases import WeightCase, WeightCases
from hfkv.testing.weights import small_model
from hfkv.weights import QuantizedLinear

SCRIPT = """
import json, shutil, sys, torch, torch.utils.cpp_extension

def refuse(*arguments, **options):
    raise SystemExit("something would be compiled")

torch.utils.cpp_extension._jit_compile = refuse
assert not [name for name in ("c++", "g++", "cc", "gcc", "nvcc", "ninja") if shutil.which(name)]
import hfkv
from hfkv.testing.weights import logits, small_model
for name, options in json.load(sys.stdin):
    model = hfkv.quantize_weights(small_model(torch.bfloat16), hfkv.WeightConfig(name, **options))
    assert logits(model).isfinite().all(), (name, options)
    print(name, options)
"""


@pytest.fixture(params=[None, "reference"], ids=["best kernels", "no kernels"])
def chosen(request, monkeypatch):
    """Whether a product of the kernels may be used."""
    if request.param is not None:
        monkeypatch.setenv("HFKV_KERNELS", request.param)
    kernels.forget_choices()
    yield
    monkeypatch.undo()
    kernels.forget_choices()


@pytest.mark.usefixtures("chosen")
def test_slow_path_is_not_silent(hfkv_weights: WeightCase):
    """Where a token is computed with the decoded weight, `hfkv.describe` says so, and nowhere else."""
    model = hfkv.quantize_weights(small_model(torch.bfloat16), hfkv_weights.config())
    decoded = set()

    def watched(name, layer):
        decode = layer.decode

        def run(dtype):
            decoded.add(name)
            return decode(dtype)

        return run

    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            layer.decode = watched(name, layer)
    reported = {layer.name for layer in hfkv.describe(model).layers if layer.path.startswith("decoded")}
    with torch.no_grad():
        model(torch.tensor([[7]]), use_cache=False)
    assert decoded == reported


def test_no_compiler_is_needed(hfkv_all_weights: WeightCases, tmp_path):
    """Libraries compile extensions on first use; their backends here are used without."""
    given = json.dumps([(case.spec.name, dict(case.options)) for case in hfkv_all_weights.cases])
    variables = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "CUDA_HOME")}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, env=variables | {"PATH": str(tmp_path)}, input=given, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(hfkv_all_weights.cases) > 10
