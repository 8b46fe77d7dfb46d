"""Activation: in every order of imports, all or nothing, and undone without a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

import hfkv
from hfkv import autoload

# what a process shows of its own state, as the last line of its output
REPORT = """
import json, sys
import transformers
from transformers.generation import configuration_utils, utils
from transformers.generation.continuous_batching import ContinuousMixin
from transformers.modeling_utils import AttentionInterface

def places():
    mixin = utils.GenerationMixin
    return {
        "names": configuration_utils.ALL_CACHE_IMPLEMENTATIONS,
        "prepare_cache": mixin._prepare_cache_for_generation,
        "prepare_config": mixin._prepare_generation_config,
        "continuous_batching": mixin.init_continuous_batching,
        "sdpa": AttentionInterface._global_mapping["sdpa"],
    }

def patched():
    names = ["names"] if "kivi" in configuration_utils.ALL_CACHE_IMPLEMENTATIONS else []
    made_in = {name: getattr(value, "__globals__", {}).get("__name__", "") for name, value in places().items()}
    return sorted(names + [name for name, module in made_in.items() if module.startswith("hfkv.")])

def tiny():
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()

def generate(model=None, **arguments):
    import torch
    asked = {"max_new_tokens": 12, "return_dict_in_generate": True, "do_sample": False, **arguments}
    return (model or tiny()).generate(torch.arange(20)[None], **asked)

def cache_of(output):
    return output["cache" if "cache" in output else "past_key_values"]

SMALL = {"group_size": 8, "residual_length": 8, "sink_length": 0}
def kivi():
    return repr(cache_of(generate(cache_implementation="kivi", cache_config=SMALL)))

def report(**more):
    print(json.dumps({"patched": patched(), **more}))
"""
ALL = ["continuous_batching", "names", "prepare_cache", "prepare_config", "sdpa"]


def python(code: str, *options: str, **environment: str) -> dict[str, object]:
    """Run a script in a fresh interpreter; what it reports, and ``stderr``."""
    names = {name: value for name, value in os.environ.items() if not name.startswith("HFKV_")}
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code).replace("REPORT", REPORT)],
        capture_output=True,
        text=True,
        env={**names, "PYTHONPATH": path, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


@pytest.mark.parametrize(
    ("imports", "environment"),
    [
        pytest.param("import torch", {}, id="torch first"),
        pytest.param(
            """
            from transformers import GenerationConfig
            early = GenerationConfig(max_new_tokens=4)
            from transformers.generation import GenerationMixin
            early.update(cache_implementation="kivi")
            """,
            {},
            id="a GenerationConfig before torch, and a module that imports torch while it is imported",
        ),
        pytest.param(
            "from transformers import LlamaForCausalLM; import hfkv",
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            id="transformers before hfkv",
        ),
    ],
)
def test_every_order_of_imports(imports, environment):
    found = python(f"{textwrap.dedent(imports)}\nREPORT\nreport(cache=kivi(), after=patched())", **environment)
    assert found["cache"].startswith("HFKVCache('kivi', 2 layers: KiviLayer")
    # attention is wrapped when the first cache is built
    assert found["after"] == ALL
    assert "hfkv" not in found["stderr"]


def test_switched_off_nothing_is_patched_until_it_is_activated():
    found = python(
        """
        import torch
        REPORT
        before = places()
        import hfkv
        model, steps = tiny(), []
        def refused():
            try:
                generate(model, cache_implementation="kivi")
            except ValueError as error:
                return "Invalid `cache_implementation` (kivi)" in str(error)
        # a cache that is built by hand works, patches nothing, and says what it costs
        by_hand = [repr(cache_of(generate(model, **{argument: hfkv.make_cache("kivi", model, **SMALL)})))
                   for argument in ["cache" if "cache" in generate(model) else "past_key_values"] * 2]
        steps.append([hfkv.autoload.is_active(), patched(), refused()])
        hfkv.activate()
        hfkv.activate()
        kivi()
        steps.append([hfkv.autoload.is_active(), patched(), refused()])
        hfkv.deactivate()
        steps.append([hfkv.autoload.is_active(), patched(), refused()])
        same = [name for name, value in places().items() if value is before[name]]
        own = "init_continuous_batching" in vars(utils.GenerationMixin)
        finders = sum(type(finder).__module__ == "hfkv.autoload" for finder in sys.meta_path)
        # PyTorch's call comes to nothing after the user has switched hfkv off
        hfkv.autoload.register()
        steps.append([hfkv.autoload.is_active(), patched(), refused()])
        hfkv.activate()
        kivi()
        steps.append([hfkv.autoload.is_active(), patched(), refused()])
        report(steps=steps, same=sorted(same), own=own, finders=finders, by_hand=by_hand)
        """,
        HFKV_AUTOLOAD="0",
    )
    off, on = [False, [], True], [True, ALL, None]
    assert found["steps"] == [off, on, off, off, on]
    assert found["same"] == ALL
    assert not found["own"]
    assert found["finders"] == 0
    assert all(cache.startswith("HFKVCache('kivi', 2 layers: KiviLayer") for cache in found["by_hand"])
    assert found["stderr"].count("hfkv is not active, so attention dequantizes") == 1


def test_the_watched_modules_look_as_if_hfkv_were_not_there():
    found = python(
        """
        import importlib, importlib.resources, importlib.util, inspect, pickle
        from importlib.machinery import ModuleSpec, SourceFileLoader
        import torch

        # a finder of somebody else that asks all others, as ours does
        class Nosy:
            def find_spec(self, fullname, path=None, target=None):
                if fullname.startswith("transformers.generation."):
                    for finder in sys.meta_path:
                        spec = finder.find_spec(fullname, path, target) if finder is not self else None
                        if spec is not None:
                            return spec
        import sys
        sys.meta_path.append(Nosy())
        sys.meta_path.insert(0, Nosy())

        spec = importlib.util.find_spec("transformers.generation.utils")
        source = spec.loader.get_source(spec.name)
        unloaded = [spec.origin, "class GenerationMixin" in source, spec.loader.is_package(spec.name)]
        REPORT
        looks = {}
        for module in (configuration_utils, utils):
            spec = module.__spec__
            looks[module.__name__] = [
                type(spec) is ModuleSpec,
                type(spec.loader) is SourceFileLoader,
                module.__loader__ is spec.loader,
                importlib.util.find_spec(module.__name__) is spec,
                inspect.getsourcefile(module) == module.__file__ == spec.origin,
                "hfkv" not in inspect.getsource(module),
                importlib.resources.files(module.__package__).joinpath("utils.py").is_file(),
            ]
        mixin = utils.GenerationMixin
        method = mixin._prepare_cache_for_generation
        looks["source"] = ["def _prepare_cache_for_generation" in inspect.getsource(method)]
        looks["pickle"] = [
            pickle.loads(pickle.dumps(value)) is value for value in (mixin, method, transformers.GenerationConfig)
        ]
        importlib.reload(configuration_utils)
        importlib.reload(utils)
        looks["reload"] = [utils.GenerationMixin is not mixin, utils.__spec__.loader is utils.__loader__]
        reloaded = patched()
        sys.modules["hfkv"].deactivate()
        old = mixin._prepare_cache_for_generation is method
        report(unloaded=unloaded, looks=looks, reloaded=reloaded, old=old)
        """
    )
    assert found["unloaded"][0].endswith("utils.py")
    assert found["unloaded"][1:] == [True, False]
    assert {name: all(values) for name, values in found["looks"].items()} == dict.fromkeys(found["looks"], True)
    assert found["reloaded"] == ["continuous_batching", "names", "prepare_cache", "prepare_config"]
    # undone in the class that the reload replaced, too
    assert found["patched"] == []
    assert not found["old"]


def test_a_release_that_lacks_what_is_patched_is_left_alone():
    found = python(
        """
        import torch
        from transformers.generation.continuous_batching import ContinuousMixin
        original = ContinuousMixin.init_continuous_batching
        del ContinuousMixin.init_continuous_batching
        import transformers.generation.utils
        ContinuousMixin.init_continuous_batching = original
        REPORT
        import hfkv
        first = [hfkv.autoload.is_active(), patched()]
        del utils.GenerationMixin._prepare_generation_config
        try:
            hfkv.activate()
        except AttributeError as error:
            told = str(error)
        del utils.GenerationMixin
        hfkv.autoload.register()
        class GenerationMixin(ContinuousMixin):
            _prepare_cache_for_generation = _prepare_generation_config = None
        utils.GenerationMixin = GenerationMixin
        report(first=first, told=told, active=hfkv.autoload.is_active())
        """
    )
    assert found["first"] == [False, []]
    assert "_prepare_generation_config" in found["told"]
    assert not found["active"]
    assert found["patched"] == []
    # one line for each of the two that nobody could catch
    assert found["stderr"].count("hfkv is not active") == 2
    assert "transformers.generation.utils could not be patched: AttributeError" in found["stderr"]
    assert "Traceback" not in found["stderr"]


def test_warnings_as_errors_and_a_broken_plugin(install):
    broken = install("import warnings; warnings.warn('old', DeprecationWarning); raise SystemExit('no licence')")
    found = python(
        "import hfkv\nREPORT\nreport(cache=kivi())",
        "-W",
        "error",
        # torch itself warns where transformers imports it
        "-W",
        "ignore:`torch.jit.script:DeprecationWarning",
    )
    assert found["cache"].startswith("HFKVCache('kivi'")
    assert found["stderr"].count(f"hfkv left out the plugin {broken!r}: DeprecationWarning: old") == 1


def test_importing_torch_loads_two_small_modules():
    found = python(
        """
        import json, sys, torch
        before = set(sys.modules)
        torch._import_device_backends()
        print(json.dumps({"new": sorted(set(sys.modules) - before)}))
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert found["new"] == ["hfkv", "hfkv.autoload"]


@pytest.fixture
def active():
    """Leave hfkv as it was found."""
    assert autoload.is_active()
    yield
    hfkv.activate()


def test_what_others_put_on_top_stays(active, caplog):
    import torch  # noqa: F401
    from transformers import GenerationMixin

    ours = GenerationMixin._prepare_cache_for_generation

    def theirs(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    GenerationMixin._prepare_cache_for_generation = theirs
    try:
        hfkv.deactivate()
        assert GenerationMixin._prepare_cache_for_generation is theirs
        assert "_prepare_cache_for_generation of GenerationMixin was replaced" in caplog.text
    finally:
        GenerationMixin._prepare_cache_for_generation = ours.__wrapped__


def test_a_module_that_another_thread_is_importing_is_patched_at_its_end(active, monkeypatch):
    """The import system marks a running import on the module's spec; the patch waits for the mark to go."""
    import torch  # noqa: F401
    from transformers.generation import configuration_utils

    spec = configuration_utils.__spec__
    hfkv.deactivate()
    spec._initializing = True
    hfkv.activate()
    assert "kivi" not in configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    spec._initializing = False
    assert "kivi" in configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    assert type(spec).__module__.startswith(("importlib", "_frozen_importlib"))

    # switched off while the import runs
    hfkv.deactivate()
    spec._initializing = True
    hfkv.activate()
    hfkv.deactivate()
    spec._initializing = False
    assert "kivi" not in configuration_utils.ALL_CACHE_IMPLEMENTATIONS
