"""What the plugin promises before its library is imported."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from transformers import LlamaConfig

import hfkv
from hfkv import registry

LIBRARY = "hqq"
SPEC = registry.manager().specs(hfkv.KVQuantizerSpec)["hqq"]
CONFIG = LlamaConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=1)


@pytest.fixture
def installed(monkeypatch):
    """Let the metadata say that another version of the library is installed, or none."""
    real = importlib.metadata.version

    def give(found):
        def version(name):
            if name != LIBRARY:
                return real(name)
            if found is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(importlib.metadata, "version", version)

    return give


@pytest.mark.parametrize(("found", "what"), [(None, "not installed"), ("0.2.6", "found 0.2.6")])
@pytest.mark.parametrize("options", [{}, {"axis_key": 0, "axis_value": 0}])
def test_library_missing_or_of_the_wrong_version_says_what_to_install(installed, found, what, options):
    installed(found)
    message = rf"backend='hqq' needs hqq>=0.2.8,<0.3 \({what}\). Fix: pip install 'hqq>=0.2.8,<0.3'"
    with pytest.raises(ImportError, match=message):
        hfkv.make_cache("kivi", CONFIG, backend="hqq", **options)


def test_versions_that_fit_are_taken(installed):
    for found in ("0.2.8", "0.2.8.post1", "0.2.9"):
        installed(found)
        assert hfkv.make_cache("kivi", CONFIG, backend="hqq").layers[0].quantizer.name == "hqq"


def test_installing_the_plugin_installs_what_it_requires():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(SPEC.requires) <= set(project["dependencies"])


@pytest.mark.parametrize("option", ["nbits", "key_nbits", "value_nbits"])
def test_width_that_the_storage_lacks_is_refused_with_the_choices(option):
    with pytest.raises(ValueError, match=f"{option}=1 is not supported. Choose from: 2, 3, 4, 8"):
        hfkv.make_cache("kivi", CONFIG, backend="hqq", **{option: 1})
