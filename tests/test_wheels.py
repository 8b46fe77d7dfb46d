"""hfkv as a user gets it: wheels in a fresh environment, and scripts that never import hfkv."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints-dev.txt"
OURS = [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]

# what a user's script looks like; what it learns of hfkv it reads from the modules that were loaded for it
SCRIPT = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)).eval()
prompt = torch.randint(3, 128, (1, 300))
heavy = [name for name in ("optimum.quanto", "hfkv_kivi.layer") if name in sys.modules]
output = model.generate(
    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, min_new_tokens=8, do_sample=False,
    return_dict_in_generate=True, **json.loads(sys.argv[1]),
)
cache = output.get("cache", output.get("past_key_values"))
hfkv = sys.modules["hfkv"]
print(json.dumps({
    "tokens": output.sequences[0, 300:].tolist(),
    "cache": type(cache).__module__,
    "layer": type(cache.layers[0]).__module__,
    "packed_bytes": hfkv.memory(cache).packed_bytes,
    "loaded_before": heavy,
    "quanto": "optimum.quanto" in sys.modules,
    "files": {name: module.__file__ for name, module in sys.modules.items() if name.startswith("hfkv")},
}))
"""


class Environment:
    """A virtual environment that knows nothing of this one."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self.folder = folder.resolve()
        self.bin = self.folder / ("Scripts" if os.name == "nt" else "bin")
        leaks = ("PYTHON", "HFKV_", "VIRTUAL_ENV")
        self.variables = {key: value for key, value in os.environ.items() if not key.startswith(leaks)}

    def run(self, *command: str | Path, fails: bool = False) -> str:
        """Run a command of the environment, outside the repository; returns what it prints."""
        done = subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert (done.returncode != 0) == fails, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def install(self, *requirements: str | Path) -> None:
        # what is imported gets compiled when it is: all the rest would cost half of the time
        self.run("python", "-m", "pip", "install", "--quiet", "--no-compile", *requirements)

    def generate(self, **arguments: object) -> dict:
        """What the script reports of ``generate(**arguments)``."""
        (self.folder / "script.py").write_text(SCRIPT, encoding="utf-8")
        return json.loads(self.run("python", "script.py", json.dumps(arguments)).splitlines()[-1])

    def plugins(self) -> dict[str, dict]:
        return {plugin["name"]: plugin for plugin in json.loads(self.run("hfkv", "list", "--json"))["plugins"]}


def build(target: Path, *sources: Path) -> dict[str, Path]:
    """Build wheels; returns them by distribution name."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--build-constraint",
        CONSTRAINTS,
        # two processes may build at once, and the folder that plugins/hfkv-cpu names for its objects holds one build
        f"--config-settings=build-dir={target / 'objects'}",
        "-w",
        target,
    ]
    subprocess.run([*command, *sources], check=True, timeout=300)
    return {wheel.name.partition("-")[0].replace("_", "-"): wheel for wheel in target.glob("*.whl")}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    return build(tmp_path_factory.mktemp("wheels"), *OURS)


@pytest.fixture(scope="module")
def environment(tmp_path_factory, wheels):
    """``pip install 'hfkv[quanto]'`` where no package of the repository is installed."""
    folder = tmp_path_factory.mktemp("fresh")
    ours = folder / "ours.txt"
    ours.write_text("".join(f"{name} @ {wheel.as_uri()}\n" for name, wheel in wheels.items()), encoding="utf-8")
    fresh = Environment(folder / "venv")
    # torch first and alone, as everywhere: nothing may bring another build of it
    fresh.install("-c", CONSTRAINTS, "torch")
    # the second constraints file says that names of ours are these wheels, whatever a registry has under them
    fresh.install("-c", CONSTRAINTS, "-c", ours, f"hfkv[quanto] @ {wheels['hfkv'].as_uri()}")
    yield fresh
    # over a gigabyte, which pytest would keep for three runs
    shutil.rmtree(fresh.folder)


def check_origin(report: dict, environment: Environment) -> None:
    assert report["files"], "hfkv was not loaded"
    for name, file in report["files"].items():
        assert Path(file).resolve().is_relative_to(environment.folder), f"{name} leaked in from {file}"


def test_every_distribution_is_one_wheel(wheels):
    assert set(wheels) == {"hfkv", *(folder.name for folder in OURS[1:])}


def test_extra_installs_the_backend_and_the_cache_it_serves(environment):
    installed = {item["name"] for item in json.loads(environment.run("python", "-m", "pip", "list", "--format=json"))}
    assert {"hfkv", "hfkv-kivi", "hfkv-quanto", "optimum-quanto"} <= installed
    assert "hfkv-hqq" not in installed


def test_generate_with_kivi_and_no_import(environment):
    report = environment.generate(cache_implementation="kivi", cache_config={"nbits": 8})
    check_origin(report, environment)
    assert report["cache"].startswith("hfkv.")
    assert report["layer"].startswith("hfkv_kivi.")
    assert report["packed_bytes"] > 0
    assert report["loaded_before"] == []
    assert not report["quanto"]


def test_generate_with_the_quanto_backend_and_no_import(environment):
    report = environment.generate(cache_implementation="kivi", cache_config={"backend": "quanto", "nbits": 4})
    check_origin(report, environment)
    assert report["layer"].startswith("hfkv_kivi.")
    assert report["packed_bytes"] > 0
    assert report["quanto"], "quanto was asked for, and its code never ran"


def test_third_party_plugin_works_beside_a_broken_one(environment, tmp_path):
    (example,) = (path.parent for path in ROOT.glob("examples/third_party_cache/**/pyproject.toml"))
    broken = tmp_path / "broken"
    (broken / "hfkv_broken").mkdir(parents=True)
    (broken / "pyproject.toml").write_text(
        textwrap.dedent("""
            [build-system]
            requires = ["hatchling"]
            build-backend = "hatchling.build"

            [project]
            name = "hfkv-broken"
            version = "1.0"

            [project.entry-points.hfkv]
            broken = "hfkv_broken.plugin"
        """),
        encoding="utf-8",
    )
    (broken / "hfkv_broken" / "__init__.py").touch()
    (broken / "hfkv_broken" / "plugin.py").write_text('raise RuntimeError("no luck today")\n', encoding="utf-8")
    before = environment.plugins()
    built = build(tmp_path / "wheels", example, broken)
    try:
        environment.install("--no-deps", *built.values())
        after = environment.plugins()
        (added,) = (plugin for name, plugin in after.items() if name not in before and name != "broken")
        assert added["error"] is None
        assert "no luck today" in after["broken"]["error"]
        assert {name: after[name] for name in before} == before
        environment.run("hfkv", "list", "--strict", fails=True)

        (cache,) = (spec["name"] for spec in added["specs"])
        theirs = environment.generate(cache_implementation=cache)
        check_origin({"files": {"hfkv": theirs["files"]["hfkv"]}}, environment)
        assert theirs["cache"].startswith("hfkv.")
        assert not theirs["layer"].startswith(("hfkv.", "hfkv_kivi.", "transformers."))
        assert environment.generate(cache_implementation="kivi")["layer"].startswith("hfkv_kivi.")
    finally:
        environment.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", *built)
