"""The registry: one broken plugin takes nothing else down, and every message says whose fault it is."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

import hfkv
from hfkv import registry
from hfkv.registry import PluginManager, unmet
from hfkv.specs import CacheSpec, KernelSpec, KVQuantizerSpec

GOOD = """
@hfkv.hookimpl
def hfkv_caches():
    yield hfkv.CacheSpec(name="{name}", summary="a cache", load="somewhere:Layer")
"""


def hook(body: str, name: str = "hfkv_caches", mark: str = "@hfkv.hookimpl", arguments: str = "") -> str:
    return f"{mark}\ndef {name}({arguments}):\n    {body}\n"


def spec(**fields: object) -> str:
    given = {"name": "good", "summary": "", "load": "somewhere:Layer", **fields}
    return f"hfkv.CacheSpec({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def module(code: str) -> types.ModuleType:
    made = types.ModuleType("in_process")
    exec("import hfkv\n" + code, vars(made))
    return made


def discovered(only: list[str] | None = None) -> PluginManager:
    manager = PluginManager(only)
    manager.discover()
    return manager


def record(manager: PluginManager, name: str) -> registry.Plugin:
    return next(plugin for plugin in manager.plugins() if plugin.name == name)


BROKEN = {
    "import error": (
        "import no_such_module_anywhere",
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'",
    ),
    "syntax error": ("def f(:", "SyntaxError"),
    "exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "no Exception": (
        "class PanicException(BaseException): pass\nraise PanicException('unwrap on None')",
        "PanicException: unwrap on None",
    ),
    "hook fails": (hook("1 / 0"), "ZeroDivisionError"),
    "hook fails midway": (hook(f"yield {spec()}; yield {spec(name='more')}; 1 / 0"), "ZeroDivisionError"),
    "hook exits midway": (hook(f"yield {spec()}; raise SystemExit('no GPU')"), "SystemExit: no GPU"),
    "second hook fails": (
        hook(f"yield {spec()}") + hook("raise OSError('gone')", "hfkv_kernels"),
        "OSError: gone",
    ),
    "a string": (hook("yield 'kivi'"), "must yield CacheSpec records, got 'kivi'"),
    "another kind": (
        hook("yield hfkv.KVQuantizerSpec(name='good', summary='', load='a:b')"),
        "must yield CacheSpec records, got KVQuantizerSpec",
    ),
    "nothing": (hook("pass"), "hfkv_caches returns None: it must yield CacheSpec records"),
    "a number": (hook("return 4"), "must yield CacheSpec records, got 4"),
    "misspelt hook": (hook(f"yield {spec()}", "hfkv_cache"), "unknown hook 'hfkv_cache'. Did you mean 'hfkv_caches'?"),
    "misspelt beside a good one": (
        hook(f"yield {spec()}") + hook("yield", "hfkv_kernel"),
        "unknown hook 'hfkv_kernel'. Did you mean 'hfkv_kernels'?",
    ),
    "not marked": (hook(f"yield {spec()}", mark=""), "hfkv_caches is not marked as a hook: write @hfkv.hookimpl"),
    "no hook": ("answer = 42", "implements no hook; there are hfkv_caches"),
    "argument": (hook(f"yield {spec()}", arguments="config"), "config"),
    "wrapper": (hook("yield", mark="@hfkv.hookimpl(wrapper=True)"), "PluginValidationError"),
    "name in capitals": (hook(f"yield {spec(name='Good')}"), "name='Good' must be a lower-case string"),
    "no name": (hook(f"yield {spec(name='')}"), "name='' must be a lower-case string"),
    "name is a list": (hook(f"yield {spec(name=['good'])}"), "must be a lower-case string"),
    "no attribute": (hook(f"yield {spec(load='somewhere')}"), "load='somewhere' must be 'module:attribute'"),
    "requires a string": (hook(f"yield {spec(requires='hqq>=0.2')}"), "requires='hqq>=0.2' must be a tuple"),
    "not a requirement": (hook(f"yield {spec(requires=('hqq=>0.2',))}"), "requires 'hqq=>0.2', which is not a valid"),
    "reserved cache": (hook(f"yield {spec(name='quantized')}"), "CacheSpec name 'quantized' is built in"),
    "reserved kernel": (
        hook("yield hfkv.KernelSpec(name='reference', summary='', load='a:b')", "hfkv_kernels"),
        "KernelSpec name 'reference' is built in",
    ),
    "twice": (hook(f"yield {spec()}; yield {spec()}"), "is already provided by plugin"),
    "taken": (hook(f"yield {spec(name='kivi')}"), "is already provided by plugin 'kivi'"),
}


@pytest.mark.parametrize(("code", "message"), list(BROKEN.values()), ids=list(BROKEN))
def test_broken_plugin_is_reported_and_the_others_work(install, code, message):
    broken, good = install(code), install(GOOD.format(name="works"))
    manager = discovered()
    assert message in record(manager, broken).error
    assert record(manager, broken).specs == ()
    # an entry point's distribution is known even where its module cannot be imported
    assert record(manager, broken).distribution.startswith("dist")
    assert record(manager, good).error is None
    assert record(manager, "kivi").error is None
    names = {name for name, spec in manager.specs(CacheSpec).items() if manager.owner(spec) in (broken, good, "kivi")}
    assert names == {"kivi", "works"}
    assert manager.find(CacheSpec, "kivi", "cache").load == "hfkv_kivi.layer:KiviLayer"


@pytest.mark.parametrize(
    "case", [case for case, (code, _) in BROKEN.items() if "def hfkv_" in code or case == "no hook"]
)
def test_nothing_of_a_failed_plugin_stays_registered(case):
    code, _ = BROKEN[case]
    manager = PluginManager()
    manager.register(module(hook(f"yield {spec(name='kivi')}")), "kivi")
    plugin = module(code)
    first = manager.register(plugin, "first")
    # the same object under another name: pluggy refuses one that it still holds
    second = manager.register(plugin, "second")
    assert first.error.replace("'first'", "'second'") == second.error
    assert set(manager.specs(CacheSpec)) == {"kivi"}
    # its names are free, and hooks that nobody knows are forgotten
    later = manager.register(module(GOOD.format(name="good")), "later")
    assert later.error is None
    assert manager.owner(manager.specs(CacheSpec)["good"]) == "later"


def test_specs_know_their_plugin():
    manager = discovered()
    assert manager.owner(manager.specs(CacheSpec)["kivi"]) == "kivi"
    assert manager.owner(manager.specs(KVQuantizerSpec)["rtn"]) == "kivi"
    assert record(manager, "kivi").distribution == "hfkv-kivi"
    assert record(manager, "kivi").version == hfkv.__version__


def test_two_plugins_with_one_cache_name_both_named_and_the_first_keeps_working(install):
    first = install(GOOD.format(name="same"), name="a-first")
    second = install(GOOD.format(name="same") + hook("yield " + spec(name="other"), "hfkv_caches"), name="b-second")
    manager = discovered()
    assert record(manager, first).error is None
    # the second definition of the hook in that module is the one that counts
    assert manager.owner(manager.specs(CacheSpec)["same"]) == first
    assert record(manager, second).error is None

    third = install(hook(f"yield {spec(name='fine')}; yield {spec(name='same')}"), name="c-third")
    manager = discovered()
    error = record(manager, third).error
    assert "'same'" in error
    assert repr(first) in error
    assert repr(third) in error
    assert "fine" not in manager.specs(CacheSpec)
    assert manager.owner(manager.specs(CacheSpec)["same"]) == first


def test_one_name_may_be_used_by_specs_of_different_kinds():
    manager = PluginManager()
    plugin = module(
        hook("yield hfkv.KVQuantizerSpec(name='hqq', summary='', load='a:b')", "hfkv_kv_quantizers")
        + hook("yield hfkv.WeightQuantizerSpec(name='hqq', summary='', load='a:b')", "hfkv_weight_quantizers")
    )
    assert manager.register(plugin, "hqq").error is None


def test_two_distributions_with_one_plugin_name(install):
    install(GOOD.format(name="one"), name="same", distribution="dist-one")
    install(GOOD.format(name="two"), name="same", distribution="dist-two")
    manager = discovered()
    works, refused = [plugin for plugin in manager.plugins() if plugin.name.startswith("same")]
    assert works.error is None
    assert refused.name == f"same ({refused.distribution})"
    assert "'same' is taken twice" in refused.error
    assert {works.distribution, refused.distribution} == {"dist-one", "dist-two"}


def test_one_module_under_two_names_works_once():
    manager = PluginManager()
    plugin = module(GOOD.format(name="good"))
    assert manager.register(plugin, "one").error is None
    assert "already registered" in manager.register(plugin, "two").error
    assert manager.owner(manager.specs(CacheSpec)["good"]) == "one"


def test_reserved_names_are_those_of_transformers():
    import torch  # noqa: F401  activates hfkv before transformers is imported
    from transformers.generation import configuration_utils

    theirs = set(configuration_utils.ALL_CACHE_IMPLEMENTATIONS) - set(registry.manager().specs(CacheSpec))
    reserved = registry.RESERVED[CacheSpec]
    assert theirs <= reserved
    # "paged" goes to continuous batching, "mamba" was a cache of transformers 4
    assert reserved - theirs == {"paged", "mamba"}


class TestRequires:
    def spec(self, *requires: str) -> CacheSpec:
        return CacheSpec(name="x", summary="", load="nowhere_at_all:Layer", requires=requires)

    @pytest.mark.parametrize(
        "requirement",
        [
            "pytest",
            "PyTest>=8",
            "pytest[dev]>=8",
            "pytest @ https://example.org/pytest.whl",
            "no-such-thing; python_version < '3'",
            "no-such-thing; extra == 'gpu'",
        ],
    )
    def test_met(self, requirement):
        assert unmet(self.spec(requirement)) == []

    @pytest.mark.parametrize(
        ("requirement", "found"),
        [
            ("no-such-thing>=1", "no-such-thing>=1 (not installed)"),
            ("no-such-thing; python_version >= '3'", "(not installed)"),
            ("pytest>=1000", f"pytest>=1000 (found {pytest.__version__})"),
            ("pytest>=8,<8", f"(found {pytest.__version__})"),
        ],
    )
    def test_unmet(self, requirement, found):
        (problem,) = unmet(self.spec("pluggy", requirement))
        assert found in problem

    def test_pre_release_counts(self, install):
        install(GOOD.format(name="x"), distribution="early", version="2.0rc1")
        assert unmet(self.spec("early>=1.5")) == []

    def test_version_that_nobody_can_read(self, install):
        install(GOOD.format(name="x"), distribution="odd", version="unknown")
        assert unmet(self.spec("odd")) == []
        assert unmet(self.spec("odd>=1")) == ["odd>=1 (found unknown)"]

    def test_checked_before_any_import(self):
        manager = PluginManager()
        manager.register(module(hook(f"yield {spec(load='nowhere_at_all:X', requires=('no-such-thing>=2',))}")), "p")
        with pytest.raises(ImportError) as caught:
            manager.find(CacheSpec, "good", "cache_implementation")
        # not ModuleNotFoundError: nothing was imported
        assert type(caught.value) is ImportError
        assert "cache_implementation='good' needs no-such-thing>=2 (not installed)" in str(caught.value)
        assert "Fix: pip install 'no-such-thing>=2'" in str(caught.value)


class TestFind:
    def test_lists_the_choices_and_the_closest(self):
        with pytest.raises(ValueError, match=r"backend='RTN' is not known\. Choose from: .*rtn.*Did you mean 'rtn'\?"):
            discovered(["kivi"]).find(KVQuantizerSpec, "RTN", "backend")

    @pytest.mark.parametrize("name", [4, None, ["kivi"], {"kivi": 1}])
    def test_no_string(self, name):
        with pytest.raises(ValueError, match=r"cache_implementation=.* is not known"):
            discovered(["kivi"]).find(CacheSpec, name, "cache_implementation")

    def test_says_that_there_is_none(self):
        with pytest.raises(ValueError, match="Choose from: none: no installed plugin provides any"):
            PluginManager().find(CacheSpec, "kivi", "cache_implementation")

    def test_points_to_broken_plugins(self, install):
        broken = install("import no_such_module_anywhere", name="ema")
        with pytest.raises(ValueError, match=f"Broken plugins, which `hfkv list` explains: {broken}"):
            discovered().find(CacheSpec, "ema", "cache_implementation")


class TestEnvironment:
    def manager(self, monkeypatch, **variables: str) -> PluginManager:
        for name in ("HFKV_PLUGINS", "HFKV_TRACE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        # the undecorated function: a manager of its own, not the process's
        return registry.manager.__wrapped__()

    def test_limit(self, install, monkeypatch):
        other = install("raise SystemExit('never imported')")
        manager = self.manager(monkeypatch, HFKV_PLUGINS=" kivi , ")
        assert [plugin.name for plugin in manager.plugins()] == ["kivi"]
        manager = self.manager(monkeypatch, HFKV_PLUGINS=f"kivi,{other}")
        assert {plugin.name for plugin in manager.plugins()} == {"kivi", other}

    def test_empty_loads_none(self, monkeypatch):
        assert self.manager(monkeypatch, HFKV_PLUGINS="").plugins() == []

    def test_unset_loads_all(self, monkeypatch):
        assert "kivi" in {plugin.name for plugin in self.manager(monkeypatch).plugins()}

    def test_unknown_name_is_told(self, monkeypatch):
        manager = self.manager(monkeypatch, HFKV_PLUGINS="kivy")
        (plugin,) = manager.plugins()
        assert plugin.name == "kivy"
        assert plugin.error == "ValueError: HFKV_PLUGINS names it, but it is not installed. Did you mean 'kivi'?"

    def test_trace_prints_plugins_hooks_and_tracebacks(self, install, monkeypatch, capsys):
        broken = install(hook("1 / 0"))
        self.manager(monkeypatch, HFKV_TRACE="1")
        printed = capsys.readouterr().err
        assert "plugin 'kivi'" in printed
        assert "hfkv_caches" in printed
        assert "CacheSpec 'kivi'" in printed
        assert f"plugin {broken!r} is broken" in printed
        assert "1 / 0" in printed

    @pytest.mark.parametrize("value", ["", "0"])
    def test_trace_off(self, monkeypatch, capsys, value):
        self.manager(monkeypatch, HFKV_TRACE=value)
        assert capsys.readouterr().err == ""


class TestInProcess:
    def test_registering_again_replaces(self, register):
        register(module(GOOD.format(name="ema")), "cell")
        register(module(GOOD.format(name="ema2")), "cell")
        names = registry.manager().specs(CacheSpec)
        assert "ema2" in names
        assert "ema" not in names

    def test_a_broken_one_raises_and_the_next_try_is_free(self, register):
        with pytest.raises(ValueError, match=r"plugin 'cell': ValueError: unknown hook 'hfkv_cache'\. Did you mean"):
            register(module(hook(f"yield {spec()}", "hfkv_cache")), "cell")
        assert "cell" not in {plugin.name for plugin in hfkv.plugins()}
        register(module(GOOD.format(name="ema")), "cell")
        assert "ema" in registry.manager().specs(CacheSpec)

    def test_an_installed_name_is_refused(self):
        with pytest.raises(ValueError, match="'kivi' belongs to the installed distribution 'hfkv-kivi'"):
            hfkv.register(module(GOOD.format(name="ema")), "kivi")
        with pytest.raises(ValueError, match="HFKV_PLUGINS"):
            hfkv.unregister("kivi")
        assert "kivi" in registry.manager().specs(CacheSpec)

    def test_unregister(self, register):
        register(module(GOOD.format(name="ema")), "cell")
        hfkv.unregister("cell")
        hfkv.unregister("never registered")
        assert "ema" not in registry.manager().specs(CacheSpec)

    def test_an_object_with_hooks(self, register):
        class Plugin:
            @hfkv.hookimpl
            def hfkv_kernels(self):
                return [KernelSpec(name="mine", summary="", load="a:b", priority=5)]

        register(Plugin(), "object")
        assert registry.manager().specs(KernelSpec)["mine"].priority == 5


@pytest.mark.parametrize("statement", ["import hfkv", "import hfkv; hfkv.plugins()"])
def test_neither_torch_nor_transformers_is_imported(statement):
    code = f"{statement}; import sys; print(sorted({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_a_plugin_that_asks_for_plugins_at_import_does_no_harm(install):
    name = install("hfkv.plugins()\n" + GOOD.format(name="curious"))
    code = "import hfkv; print([plugin.error for plugin in hfkv.plugins() if plugin.name in ('kivi', {name!r})])"
    path = __import__("os").pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code.format(name=name)],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": path},
    )
    assert done.stdout == "[None, None]\n"
