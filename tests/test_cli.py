"""The command line without a model: `list`, subcommands of plugins, and what errors look like."""

from __future__ import annotations

import io
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from rich.console import Console

import hfkv
from hfkv.cli import kernels

ROOT = Path(__file__).resolve().parents[1]
HFKV = (sys.executable, "-m", "hfkv.cli")
# printed to stderr at exit: what the command imported of the heavy libraries
LOADED = """
import atexit, sys
heavy = ("torch", "transformers", "numpy")
atexit.register(lambda: sys.stderr.write(repr([name for name in heavy if name in sys.modules])))
from hfkv.cli import main
main()
"""


def run(*arguments: str, path: Path | None = None, command: tuple[str, ...] = HFKV, **variables: str):
    """Run ``hfkv`` as a user does; ``path`` holds more distributions."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HFKV_", "TORCH_"))}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path or ""), environment.get("PYTHONPATH")]))
    environment |= {"COLUMNS": "100"} | variables
    return subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=300)


def found(*arguments: str, **options) -> dict:
    done = run("list", "--json", *arguments, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def add_distribution(folder: Path, name: str, plugin: str, **modules: str) -> None:
    """Install a distribution ``hfkv-NAME`` into a folder: its plugin module, other modules and the metadata."""
    package, metadata = folder / f"hfkv_{name}", folder / f"hfkv_{name}-1.5.dist-info"
    for path in (package, metadata):
        path.mkdir()
    for module, source in {"__init__": "", "plugin": plugin, **modules}.items():
        (package / f"{module}.py").write_text(textwrap.dedent(source), encoding="utf-8")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hfkv-{name}\nVersion: 1.5\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[hfkv]\n{name} = hfkv_{name}.plugin\n", encoding="utf-8")


SUBCOMMANDS = """
import hfkv

@hfkv.hookimpl
def hfkv_subcommands():
    yield hfkv.SubcommandSpec(name="greet", summary="says [hello]", load="hfkv_lab.greet:main")
    yield hfkv.SubcommandSpec(name="crash", summary="never loads", load="hfkv_lab.crash:main")
    yield hfkv.SubcommandSpec(name="absent", summary="needs more", load="hfkv_lab.greet:main", requires=("no-such>=2",))
"""
GREET = """
import time

def main(name: str, times: int = 1, fault: str = "", wait: bool = False) -> None:
    '''Greet somebody.'''
    print(f"hello {name}\\n" * times, end="", flush=True)
    if wait:
        time.sleep(60)
    if fault:
        raise {"value": ValueError, "key": KeyError}[fault]("it went [wrong]")
"""


@pytest.fixture
def lab(tmp_path):
    """A folder with a plugin that brings subcommands, one of which cannot be imported."""
    add_distribution(tmp_path, "lab", SUBCOMMANDS, greet=GREET, crash='raise RuntimeError("no luck today")')
    return tmp_path


@pytest.fixture
def faulty(tmp_path):
    """A folder with a broken plugin, and with one that misses a requirement."""
    add_distribution(tmp_path, "broken", 'raise RuntimeError("no [luck] today")')
    add_distribution(
        tmp_path,
        "needy",
        """
        import hfkv

        @hfkv.hookimpl
        def hfkv_kv_quantizers():
            yield hfkv.KVQuantizerSpec(name="needy", summary="x", load="hfkv_needy:x", requires=("no-such>=2",))
        """,
    )
    return tmp_path


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["list"], ["list", "--json"], ["list", "--help"]])
def test_light_commands_import_nothing_heavy(arguments, lab):
    done = run(*arguments, path=lab, command=(sys.executable, "-c", LOADED))
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr == "[]"


def test_kernels_are_listed_with_torch_loaded():
    # the check above can fail: this command may load torch, and is seen to
    done = run("list", "--kernels", "--explain", command=(sys.executable, "-c", LOADED))
    assert "torch" in done.stderr
    assert "reference" in done.stdout


def test_list_takes_less_than_a_second_of_processor_time():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_version():
    assert run("--version").stdout == f"hfkv {hfkv.__version__}\n"


def test_list_shows_every_plugin_and_what_it_provides():
    table = run("list").stdout
    for plugin in found()["plugins"]:
        for spec in plugin["specs"]:
            assert any(line.split()[-2:] == [plugin["name"], spec["status"]] for line in table.splitlines())
            assert spec["name"] in table
    kivi = next(plugin for plugin in found()["plugins"] if plugin["name"] == "kivi")
    assert kivi["distribution"] == "hfkv-kivi"
    assert kivi["version"] == hfkv.__version__
    assert {("cache", "kivi"), ("KV quantizer", "rtn")} <= {(spec["kind"], spec["name"]) for spec in kivi["specs"]}


def test_list_matches_the_registry():
    listed = {plugin["name"]: [spec["name"] for spec in plugin["specs"]] for plugin in found()["plugins"]}
    assert listed.pop("core") == ["reference", "list", "demo"]
    assert listed == {plugin.name: [spec.name for spec in plugin.specs] for plugin in hfkv.plugins()}


def test_broken_and_missing_are_told_apart_with_the_fix(faulty):
    plugins = {plugin["name"]: plugin for plugin in found(path=faulty)["plugins"]}
    assert plugins["broken"]["status"] == "broken"
    assert plugins["broken"]["error"] == "RuntimeError: no [luck] today"
    assert plugins["needy"]["status"] == "ok"
    (spec,) = plugins["needy"]["specs"]
    assert (spec["status"], spec["problems"]) == ("missing", ["no-such>=2 (not installed)"])
    assert spec["fix"] == "pip install 'no-such>=2'"
    shown = run("list", path=faulty).stdout
    assert "RuntimeError: no [luck] today" in shown
    assert "hfkv-broken 1.5" in shown
    assert "fix: pip install 'no-such>=2'" in shown


def test_strict_fails_for_a_broken_plugin_alone(faulty, tmp_path):
    assert run("list", path=faulty).returncode == 0
    assert run("list", "--strict", path=faulty).returncode == 1
    assert run("list", "--strict", "--json", path=faulty).returncode == 1
    # a requirement that is missing is not a fault
    assert run("list", "--strict", path=faulty, HFKV_PLUGINS="needy").returncode == 0


def test_subcommand_that_takes_a_name_of_ours_is_reported(tmp_path):
    plugin = """
        import hfkv

        @hfkv.hookimpl
        def hfkv_subcommands():
            yield hfkv.SubcommandSpec(name="list", summary="mine", load="hfkv_thief.plugin:main")

        def main():
            print("stolen")
        """
    add_distribution(tmp_path, "thief", plugin)
    thief = next(plugin for plugin in found(path=tmp_path)["plugins"] if plugin["name"] == "thief")
    assert "broken" in (thief["status"], *(spec["status"] for spec in thief["specs"]))
    assert run("list", "--strict", path=tmp_path).returncode == 1
    assert "stolen" not in run("list", path=tmp_path).stdout


def site_without(folder: Path, *names: str) -> dict[str, str]:
    """Variables under which only a copy of the installed packages can be imported, without those of some names."""
    folder.mkdir()
    (site,) = {Path(path) for path in sys.path if path.endswith("site-packages")}
    for entry in site.iterdir():
        if not entry.name.lower().startswith(names) and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTHONNOUSERSITE": "1"}


@pytest.mark.parametrize(
    ("variables", "active", "reason"),
    [
        ({}, True, "no import of hfkv"),
        ({"HFKV_AUTOLOAD": "0"}, False, "HFKV_AUTOLOAD=0"),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, False, "TORCH_DEVICE_BACKEND_AUTOLOAD"),
        (None, False, "torch.backends"),
    ],
    ids=["default", "hfkv-off", "torch-off", "not-installed"],
)
def test_autoload_is_reported_as_torch_does_it(variables, active, reason, tmp_path):
    python = [sys.executable]
    if variables is None:
        # -S leaves out site-packages, where our metadata is
        python, variables = [sys.executable, "-S"], site_without(tmp_path / "site", "hfkv", "__editable__", "_hfkv")
    told = found(command=(*python, "-m", "hfkv.cli"), **variables)["autoload"]
    assert told["active"] == active
    assert reason in told["reason"]
    probe = "import torch, sys; a = sys.modules.get('hfkv.autoload'); print(bool(a and a.is_active()))"
    assert run(probe, command=(*python, "-c"), **variables).stdout == f"{active}\n"


class FourBits:
    """A kernel that attends over four bits and can do nothing else."""

    name = "fourbits"

    def supports(self, request):
        four = request.op == "attend" and all(format.nbits == 4 for format in request.formats)
        return four, "four bits, attend" if four else "not four bits"

    def attend(self, *args):
        raise RuntimeError("never called: the listing only asks")


FOUR_BITS = FourBits()


def kernel_plugin(name: str, load: str) -> object:
    class Plugin:
        @hfkv.hookimpl
        def hfkv_kernels(self):
            yield hfkv.KernelSpec(name=name, summary="x", load=load, priority=99)

    return Plugin()


def test_kernels_name_who_runs_what(register, monkeypatch):
    register(kernel_plugin("fourbits", f"{__name__}:FOUR_BITS"), "fast")
    listed = kernels.choices()
    assert {choice["op"] for choice in listed} == {"pack", "unpack", "attend", "dequantize", "matmul"}
    # ops that it has no method for, whatever it says
    reasons = {item["reason"] for choice in listed for item in choice["verdicts"] if item["kernel"] == "fourbits"}
    assert {"has no matmul", "has no pack"} < reasons
    assert {choice["dtype"] for choice in listed} >= {"float32", "bfloat16"}
    taken = {(choice["op"], choice["nbits"]) for choice in listed if choice["kernel"] == "fourbits"}
    assert taken == {("attend", 4)}
    halved = {(choice["op"], choice["nbits"]) for choice in listed if choice["hierarchical"]}
    assert halved == {("pack", 8), ("unpack", 8), ("attend", 8)}
    for choice in listed:
        assert choice["verdicts"][-1]["kernel"] == "reference"
        assert choice["kernel"] == next(item["kernel"] for item in choice["verdicts"] if item["supported"])
    monkeypatch.setenv("HFKV_KERNELS", "reference")
    assert {choice["kernel"] for choice in kernels.choices()} == {"reference"}


def shown(listed: list[dict], explain: bool) -> str:
    console = Console(width=100, file=io.StringIO())
    kernels.show(console, listed, explain)
    return console.file.getvalue()


def test_reasons_stand_for_exactly_what_was_asked(register):
    register(kernel_plugin("fourbits", f"{__name__}:FOUR_BITS"), "fast")
    listed = kernels.choices()
    assert "not four bits" in shown(listed, explain=True)
    assert "not four bits" not in shown(listed, explain=False)

    def width(choice):
        return kernels._width(choice["nbits"], choice["hierarchical"])

    claimed = {
        (op, device, dtype, nbits): verdicts
        for verdicts, ops, devices, dtypes, widths in kernels._merged(listed)
        for op, device, dtype, nbits in itertools.product(ops, devices, dtypes, widths)
    }
    asked = {
        (kernels._op(choice), choice["device"], choice["dtype"], width(choice)): tuple(
            (item["kernel"], item["supported"], item["reason"]) for item in choice["verdicts"]
        )
        for choice in listed
    }
    assert claimed == asked


def test_broken_kernel_is_shown_and_breaks_nothing(register, monkeypatch):
    register(kernel_plugin("bad", f"{__name__}:NOT_THERE"), "bad")
    listed = kernels.choices()
    # the others run what it would have run
    assert {choice["kernel"] for choice in listed}.isdisjoint({None, "bad"})
    assert "NOT_THERE" in shown(listed, explain=True)
    # who asks for it by name is told, not given another
    monkeypatch.setenv("HFKV_KERNELS", "bad")
    assert {choice["kernel"] for choice in kernels.choices()} == {None}


def test_explain_without_kernels_is_a_usage_error():
    done = run("list", "--explain")
    assert done.returncode == 2
    assert "--kernels" in done.stderr


def test_help_lists_subcommands_of_plugins(lab):
    shown = run("--help", path=lab).stdout
    for name, summary in (("greet", "says [hello]"), ("crash", "never loads"), ("absent", "needs more")):
        assert any(name in line and summary in line for line in shown.splitlines())


def test_subcommand_of_a_plugin_runs_with_its_options(lab):
    assert run("greet", "you", "--times", "2", path=lab).stdout == "hello you\nhello you\n"
    assert "Greet somebody." in run("greet", "--help", path=lab).stdout
    assert run("greet", path=lab).returncode == 2


def test_subcommand_whose_requirement_is_missing_says_so(lab):
    done = run("absent", path=lab)
    assert done.returncode == 1
    assert "no-such>=2 (not installed)" in done.stderr
    assert "pip install 'no-such>=2'" in done.stderr


def test_subcommand_that_cannot_be_imported_is_one_line(lab):
    done = run("crash", path=lab)
    assert done.returncode == 1
    assert "plugin 'lab' is broken: RuntimeError: no luck today" in done.stderr
    assert "Traceback" not in done.stderr
    assert run("greet", "you", path=lab).returncode == 0


def test_users_mistake_is_one_line_and_debug_shows_the_traceback(lab):
    done = run("greet", "you", "--fault", "value", path=lab)
    assert done.returncode == 1
    assert done.stderr == "hfkv greet: it went [wrong]\n"
    traced = run("--debug", "greet", "you", "--fault", "value", path=lab)
    assert traced.returncode == 1
    assert "Traceback" in traced.stderr
    assert "ValueError: it went [wrong]" in traced.stderr


def test_fault_of_ours_names_its_type_and_the_way_to_the_traceback(lab):
    done = run("greet", "you", "--fault", "key", path=lab)
    assert done.returncode == 1
    assert "KeyError: 'it went [wrong]'" in done.stderr
    assert "--debug" in done.stderr
    assert "Traceback" not in done.stderr


def test_interrupt_ends_quietly(lab):
    variables = os.environ | {"PYTHONPATH": str(lab)}
    process = subprocess.Popen(
        [*HFKV, "greet", "you", "--wait"],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell lets what it runs in the background ignore interrupts, the tests too
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == "hello you\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == "interrupted\n"


def test_unknown_command_suggests_the_nearest():
    done = run("lst")
    assert done.returncode == 2
    assert "'list'" in done.stderr


def test_broken_plugin_breaks_no_command(faulty):
    for arguments in (["--help"], ["--version"], ["list"]):
        assert run(*arguments, path=faulty).returncode == 0
