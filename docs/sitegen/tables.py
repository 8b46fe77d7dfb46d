"""Tables and lists made from options classes, specs, hooks, the op table and the conformance kit."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from hfkv import hookspecs, registry, specs

from . import docstrings


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; an empty string where there are no rows."""
    lines = ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    if not lines:
        return ""
    return "\n".join(["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |", *lines])


def _cell(value: Any) -> str:
    return str(value).replace("\n", " ").replace("|", "\\|")


def code(value: Any) -> str:
    """A value as code."""
    return f"`{value}`"


def options(options_class: Any) -> str:
    """The options of a technique: name, default and meaning, from its dataclass."""
    return table(
        ("Option", "Default", "Meaning"),
        [
            (code(field.name), code(repr(field.default)), field.metadata.get("help", ""))
            for field in dataclasses.fields(options_class)
        ],
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
        names = [name for name in inspect.signature(method).parameters if name != "self"]
        parts.append(f"### `{op}({', '.join(names)})`\n\n{docstrings.summary(method.__doc__)}")
        parts.append(table(("Argument", "What it is"), _said(method, "Parameters")))
        returned = docstrings.sections(method.__doc__).get("Returns", "")
        # the first line of the section names the type
        parts.append("Returns " + " ".join(returned.partition("\n")[2].split()) if returned else "")
    return "\n\n".join(filter(None, parts))


def _said(method: Any, title: str) -> list[tuple[str, str]]:
    return [(code(name), meaning) for name, meaning in docstrings.entries(method.__doc__, title).items()]


def contracts(package: str = "hfkv.testing.contracts") -> str:
    """What the conformance kit checks: every test of every module, from its docstring."""
    import ast
    import importlib.util

    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ValueError(f"{package} is not there")
    names = [package]
    if spec.submodule_search_locations:
        names = [f"{package}.{module.name}" for module in pkgutil.iter_modules(spec.submodule_search_locations)]
    parts = []
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            continue
        with open(found.origin, encoding="utf-8") as source:
            tree = ast.parse(source.read())
        rows = [
            (code(node.name), docstrings.summary(ast.get_docstring(node)))
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        if rows:
            about = docstrings.summary(ast.get_docstring(tree))
            parts += [f"### `{name.rpartition('.')[2]}`", about, table(("Contract", "What must hold"), rows)]
    return "\n\n".join(filter(None, parts))
