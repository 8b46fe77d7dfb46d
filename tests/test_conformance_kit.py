"""The conformance kit as a plugin of pytest: what it selects, what it refuses, and what it costs everyone else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hfkv
from hfkv import registry
from hfkv.testing import cases, plugin

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments, folder, path=None):
    """A run of pytest in a process and a folder of its own."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if path is not None:
        variables["PYTHONPATH"] = str(path)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=600)


class Provides:
    """A plugin with one cache."""

    def __init__(self, **fields):
        self.spec = hfkv.CacheSpec(**{"name": "mine", "summary": "a cache", "load": "mine:Layer"} | fields)

    @hfkv.hookimpl
    def hfkv_caches(self):
        yield self.spec


class ProvidesQuantizer:
    """A plugin without a cache."""

    @hfkv.hookimpl
    def hfkv_kv_quantizers(self):
        yield hfkv.KVQuantizerSpec(name="other", summary="a quantizer", load="other:Quantizer", nbits=(2, 8))


class ProvidesKernels:
    """A plugin that has nothing that there are contracts for."""

    @hfkv.hookimpl
    def hfkv_kernels(self):
        yield hfkv.KernelSpec(name="fast", summary="kernels", load="fast:kernels")


def test_plugin_costs_other_runs_neither_torch_nor_transformers(tmp_path):
    (tmp_path / "test_other.py").write_text(
        "import sys\n"
        "def test_other(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('hfkv')\n"
        "    assert not {'torch', 'transformers', 'hfkv.testing.models'} & sys.modules.keys()\n"
    )
    done = run("test_other.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_everything_installed_is_selected_with_its_contract_options(register):
    register(Provides(contract_options={"size": 8}), "third")
    found = {case.spec.name: case for case in cases.select()}
    assert found.keys() == registry.manager().specs(hfkv.CacheSpec).keys()
    assert {"kivi", "mine"} <= found.keys()
    assert (found["mine"].plugin, found["mine"].options) == ("third", {"size": 8})


def test_plugins_and_caches_limit_the_selection(register):
    register(Provides(), "third")
    assert [case.label for case in cases.select(["third"])] == ["mine"]
    assert {case.label for case in cases.select(["third", "kivi"])} >= {"mine", "kivi"}
    (case,) = cases.select(["kivi"], ["kivi:nbits=4,key_axis=token,layers={}"])
    assert case.options == {**case.spec.contract_options, "nbits": 4, "key_axis": "token", "layers": {}}
    assert case.label == "kivi:nbits=4,key_axis=token,layers={}"


def test_what_cannot_be_selected_is_named_with_the_choices(register):
    register(Provides(requires=("surely-not-installed>=1",)), "third")
    register(ProvidesKernels(), "fourth")
    with pytest.raises(
        ValueError, match=r"--hfkv-plugin 'kivvi' is not installed\. Choose from: .*kivi.* Did you mean 'kivi'"
    ):
        cases.select(["kivvi"])
    with pytest.raises(ValueError, match="'fourth' provides no cache, quantizer or assistant"):
        cases.select(["fourth"])
    with pytest.raises(
        ValueError, match=r"--hfkv-cache 'kivvi' is not known\. Choose from: .*kivi.* Did you mean 'kivi'"
    ):
        cases.select(caches=["kivvi:nbits=4"])
    with pytest.raises(ValueError, match="'kivi:nbits': write options as"):
        cases.select(caches=["kivi:nbits"])
    with pytest.raises(ImportError, match=r"surely-not-installed>=1 \(not installed\)"):
        cases.select(["third"])


def test_quantizers_are_selected_by_plugin_at_each_of_their_widths(register):
    register(ProvidesQuantizer(), "third")
    assert [case.label for case in cases.select_quantizers(["third"])] == ["other-2", "other-8"]
    assert {"rtn-4", "other-2"} <= {case.label for case in cases.select_quantizers()}
    assert cases.select(["third"]) == []


def test_plugin_without_a_cache_runs_only_the_contracts_of_quantizers(tmp_path):
    contracts = ("--pyargs", "hfkv.testing.contracts", "--collect-only", "-q", "--hfkv-plugin", "hqq")
    done = run(*contracts, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    collected = re.findall(r"(\w+)\.py::test_\w+\[(.+)\]", done.stdout)
    assert {module for module, _ in collected} == {"test_quantizers", "test_weights"}
    widths = {match[0] for _, name in collected if (match := re.search(r"hqq-\d", name))}
    assert widths == {"hqq-2", "hqq-3", "hqq-4", "hqq-8"}
    assert all("hqq" in name or name == "all" for _, name in collected)


def test_broken_plugin_is_named_with_its_error(install, monkeypatch):
    name = install("raise RuntimeError('no luck today')")
    manager = registry.PluginManager()
    manager.discover()
    monkeypatch.setattr(registry, "manager", lambda: manager)
    with pytest.raises(ValueError, match=f"--hfkv-plugin '{name}' is broken: RuntimeError: no luck today"):
        cases.select([name])


def test_cache_that_misses_a_requirement_is_skipped_unless_it_was_asked_for(register):
    register(Provides(requires=("surely-not-installed>=1",)), "third")
    marks = {case.label: plugin._reason_to_skip(case) for case in cases.select()}
    assert marks["kivi"] == []
    (mark,) = marks["mine"]
    assert mark.name == "skip"
    assert mark.kwargs["reason"] == "mine needs surely-not-installed>=1 (not installed)"


def test_run_without_any_cache_is_an_error(monkeypatch, pytestconfig):
    monkeypatch.setattr(registry, "manager", registry.PluginManager)
    with pytest.raises(pytest.UsageError, match="no installed plugin provides a cache"):
        plugin._selected(pytestconfig)


def test_unknown_plugin_is_a_usage_error(tmp_path):
    done = run("--hfkv-plugin", "kivvi", folder=tmp_path)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: --hfkv-plugin 'kivvi' is not installed. Choose from: " in done.stderr


def test_contracts_are_collected_for_what_was_asked_for(tmp_path):
    contracts = ("--pyargs", "hfkv.testing.contracts", "--collect-only", "-q", "--hfkv-plugin", "kivi")
    done = run(*contracts, "--hfkv-cache", "kivi:nbits=3", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ids = re.findall(r"::test_\w+\[(.+)\]", done.stdout)
    assert len(ids) > 300
    # who names a cache wants that cache tested: no quantizers
    assert {name.partition("-")[0] for name in ids} == {"kivi:nbits=3"}


def test_example_passes_the_kit(tmp_path):
    """The command of its README, on one family of models and what runs on none."""
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", installed]
    subprocess.run([*pip, ROOT / "examples" / "third_party_cache"], check=True, timeout=300)
    command = "--pyargs hfkv.testing.contracts --hfkv-plugin int8"
    assert command in (ROOT / "examples" / "third_party_cache" / "README.md").read_text(encoding="utf-8")
    others = "not (llama or gemma3 or gemma4 or t5)"
    done = run(*command.split(), "-q", "-rs", "-k", others, folder=tmp_path, path=installed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 60
    assert "skipped" not in done.stdout
