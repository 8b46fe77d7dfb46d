"""What several test files share: plugins as a user installs them, and tiny models that each test finds as new."""

from __future__ import annotations

import copy
import itertools
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hfkv
from hfkv import registry

_numbers = itertools.count()


@pytest.fixture
def tiny() -> Iterator[Callable[[str], object]]:
    """Give the tiny model of a family (`hfkv.testing.models`); what a test does to its generation config is undone."""
    from hfkv.testing.models import load

    touched = {}

    def give(family: str = "llama", attention: str = "sdpa") -> object:
        model = load(family, attention)
        touched.setdefault(id(model), (model.model, copy.deepcopy(model.model.generation_config)))
        return model

    yield give
    for model, generation_config in touched.values():
        model.generation_config = generation_config


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    """`hfkv.register` for the time of one test."""
    names = []

    def give(plugin: object, name: str) -> None:
        names.append(name)
        hfkv.register(plugin, name)

    yield give
    for name in names:
        registry.unregister(name)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Install a distribution with one plugin into a folder of the path, as pip leaves it; return the plugin's name."""

    def give(code: str, name: str | None = None, distribution: str | None = None, version: str = "1.0") -> str:
        number = next(_numbers)
        name = name or f"plugin{number}"
        distribution = distribution or f"dist{number}"
        folder = tmp_path / f"{number:04}"
        metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir(parents=True)
        (folder / f"hfkv_module{number}.py").write_text("import hfkv\n" + textwrap.dedent(code))
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (metadata / "entry_points.txt").write_text(f"[hfkv]\n{name} = hfkv_module{number}\n")
        monkeypatch.syspath_prepend(folder)
        return name

    return give
