"""Every distribution of the repository has one shape, one version and the same promises."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager
from packaging.requirements import Requirement

import hfkv

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = sorted(path for path in (ROOT / "plugins").iterdir() if path.is_dir())
DISTRIBUTIONS = [ROOT, *PLUGINS]
# what a plugin module may import: code that costs nothing to load
LIGHT = sys.stdlib_module_names | {"pluggy", "hfkv"}


def name_of(folder: Path) -> str:
    return "hfkv" if folder == ROOT else folder.name


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def extras(folder: Path) -> dict[str, list[str]]:
    metadata = ProjectMetadata(str(folder), PluginManager())
    return metadata.core.optional_dependencies


def package(folder: Path) -> Path:
    return folder / folder.name.replace("-", "_")


every_distribution = pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=name_of)
every_plugin = pytest.mark.parametrize("folder", PLUGINS, ids=name_of)


@every_distribution
def test_version_is_that_of_the_core(folder):
    assert project(folder)["version"] == hfkv.__version__


@every_distribution
def test_siblings_are_pinned_to_the_series(folder):
    declared = sum(extras(folder).values(), project(folder)["dependencies"])
    siblings = [text for text in declared if Requirement(text).name.startswith("hfkv")]
    assert set(siblings) <= {f"{name_of(other)}~={hfkv.__version__}" for other in DISTRIBUTIONS}


@every_distribution
def test_licence_and_python_are_declared(folder):
    declared = project(folder)
    assert declared["license"] == "Apache-2.0"
    assert declared["requires-python"] == project(ROOT)["requires-python"] == ">=3.11"
    assert declared["readme"] == "README.md"
    assert declared["description"]


def test_core_has_one_extra_for_each_plugin():
    assert set(extras(ROOT)) == {"demo", *(folder.name.removeprefix("hfkv-") for folder in PLUGINS)}


@every_plugin
def test_plugin_folder_has_the_common_shape(folder):
    name = folder.name.removeprefix("hfkv-")
    declared = project(folder)
    assert folder.name.startswith("hfkv-")
    assert declared["name"] == folder.name
    assert declared["entry-points"] == {"hfkv": {name: f"hfkv_{name}.plugin"}}
    assert (package(folder) / "plugin.py").is_file()
    assert (package(folder) / "__init__.py").is_file()
    assert list((folder / "tests").glob("test_*.py"))
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert readme.startswith(f"# {folder.name}\n")
    assert f"pip install 'hfkv[{name}]'" in readme
    assert "```python" in readme


class WithoutTypeChecking(ast.NodeTransformer):
    """Takes out what a type checker reads and no program runs."""

    def visit_If(self, node):
        self.generic_visit(node)
        return node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else node


def imported_modules(source: Path, when_run: bool = False) -> set[str]:
    """Top-level names of every module that a file imports, wherever in it the import stands."""
    names = set()
    tree = ast.parse(source.read_text(encoding="utf-8"))
    for node in ast.walk(WithoutTypeChecking().visit(tree) if when_run else tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else node.module.partition(".")[0])
    return names


@every_plugin
def test_plugin_module_imports_nothing_heavy(folder):
    assert imported_modules(package(folder) / "plugin.py") <= LIGHT
    # importing the module runs the package's own __init__ first
    assert imported_modules(package(folder) / "__init__.py", when_run=True) <= LIGHT


@every_plugin
def test_plugins_never_import_one_another(folder):
    others = {package(other).name for other in PLUGINS} - {package(folder).name}
    for source in package(folder).rglob("*.py"):
        assert not imported_modules(source) & others, source


def test_core_imports_no_plugin():
    plugins = {package(folder).name for folder in PLUGINS}
    for source in (ROOT / "hfkv").rglob("*.py"):
        assert not imported_modules(source) & plugins, source


def test_ci_floor_is_that_of_the_published_range():
    published = next(text for text in project(ROOT)["dependencies"] if Requirement(text).name == "transformers")
    floor = re.search(r"transformers==([\d.]+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8")).group(1)
    assert f">={floor.removesuffix('.0')}," in published
