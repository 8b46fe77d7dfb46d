"""Tables and lists made from options classes, specs, hooks, the op table and the conformance kit."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import hfkv.cache
import hfkv.weights
from hfkv import hookspecs, registry, specs

from . import docstrings

ROOT = Path(__file__).resolve().parents[2]
_BAR = re.compile(r"(`[^`]*`)|\|")
LANGUAGES = {".py": "python", ".toml": "toml"}


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; an empty string where there are no rows."""
    lines = ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join(["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |", *lines])


def _cell(value: Any) -> str:
    # a bar inside code is no column: there the backslash would be shown
    return _BAR.sub(lambda match: match[1] or "\\|", str(value).replace("\n", " "))


def code(value: Any) -> str:
    """A value as code."""
    return f"`{value}`"


def options(options_class: Any) -> str:
    """The options of a technique: name, default and meaning, from its dataclass."""
    return _options(dataclasses.fields(options_class))


def own_options(options_class: Any) -> str:
    """The options that a dataclass adds to those of its base."""
    return _options([field for field in dataclasses.fields(options_class) if field.name in vars(options_class)])


def _options(fields: Sequence[dataclasses.Field[Any]]) -> str:
    return table(
        ("Option", "Default", "Meaning"),
        [(code(field.name), code(repr(field.default)), field.metadata.get("help", "")) for field in fields],
    )


def spec_fields(kind: type[specs.Spec]) -> str:
    """What a record holds beside the fields that every record has."""
    meanings = docstrings.entries(kind.__doc__, "Parameters")
    common = {field.name for field in dataclasses.fields(specs.Spec)} if kind is not specs.Spec else set()
    return table(
        ("Field", "Default", "Meaning"),
        [
            (code(field.name), _default(field), meanings.get(field.name, ""))
            for field in dataclasses.fields(kind)
            if field.name not in common
        ],
    )


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return code(repr(field.default))
    if field.default_factory is not dataclasses.MISSING:
        return code(repr(field.default_factory()))
    return "required"


def hook_reference() -> str:
    """Every hook with its example, the record that it yields and the fields of the record."""
    parts = [f"Fields that every record has:\n\n{spec_fields(specs.Spec)}"]
    for hook, kind in registry.KINDS.items():
        described = docstrings.markdown(getattr(hookspecs, hook).__doc__ or "")
        parts.append(f"## `{hook}`\n\n{described}")
        record = docstrings.sections(kind.__doc__)[""]
        parts.append(f"Yields [`{kind.__name__}`][hfkv.{kind.__name__}]. {docstrings.markdown(record)}")
        parts.append(spec_fields(kind))
    return "\n\n".join(filter(None, parts))


def op_table() -> str:
    """The kernel ops with their arguments and shapes, from the reference implementation."""
    from hfkv import kernels
    from hfkv.kernels.reference import ReferenceKernels

    parts = []
    for op in get_args(kernels.Op):
        method = getattr(ReferenceKernels, op)
        said = docstrings.entries(method.__doc__, "Parameters")
        arguments = {name: each for name, each in inspect.signature(method).parameters.items() if name != "self"}
        parts.append(f"### `{op}({', '.join(arguments)})`\n\n{docstrings.summary(method.__doc__)}")
        rows = [(code(name), _linked(each.annotation), said[name]) for name, each in arguments.items()]
        parts.append(table(("Argument", "Type", "What it is"), rows))
        returned = docstrings.sections(method.__doc__).get("Returns", "")
        # the first line of the section names the type
        parts.append("Returns " + " ".join(returned.partition("\n")[2].split()) if returned else "")
    return "\n\n".join(filter(None, parts))


def _linked(annotation: str) -> str:
    for module in (hfkv.cache, hfkv.weights):
        if annotation in module.__all__:
            return f"[{code(annotation)}][{module.__name__}.{annotation}]"
    return code(annotation)


def contracts(package: str = "hfkv.testing.contracts") -> str:
    """What the conformance kit checks: every test of every module of it, and what its docstring says."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"there is no package {package}")
    parts = []
    for path in sorted(Path(found.submodule_search_locations[0]).glob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lines = []
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                said = docstrings.summary(ast.get_docstring(node))
                lines.append(f"- **{node.name.removeprefix('test_').replace('_', ' ')}**{said and f': {said}'}")
        about = docstrings.summary(ast.get_docstring(tree))
        parts += [f"### `{path.name}`", about, "\n".join(lines)]
    return "\n\n".join(filter(None, parts))


def folder(path: str) -> str:
    """The files of a folder of the repository as blocks of code: what a page shows cannot drift from what is tested.

    The project file comes first, then the modules, the shortest first; tests and what is built are left out.
    """
    root = ROOT / path
    files = [root / "pyproject.toml", *sorted(root.rglob("*.py"), key=lambda file: file.stat().st_size)]
    shown = [file for file in files if not {"tests", "build"} & set(file.relative_to(root).parts)]
    if len(shown) < 2:
        raise ValueError(f"{path} has no modules to show")
    return "\n\n".join(
        f'```{LANGUAGES[file.suffix]} title="{file.relative_to(root)}"\n{file.read_text(encoding="utf-8").strip()}\n```'
        for file in shown
        if file.read_text(encoding="utf-8").strip()
    )
