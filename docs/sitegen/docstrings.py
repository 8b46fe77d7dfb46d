"""Read docstrings in NumPy style, as far as the generated tables need it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import textwrap

_HEADING = re.compile(r"^([A-Z][A-Za-z ]*)\n-{3,}$", re.MULTILINE)
_LITERAL = re.compile(r"::\n\n((?:[ ]{4}.*(?:\n|$)|\n)+)")


def sections(text: str | None) -> dict[str, str]:
    """The sections of a docstring by title; the text before the first is under the empty title."""
    parts = _HEADING.split(inspect.cleandoc(text or ""))
    return {title: body.strip("\n") for title, body in zip(["", *parts[1::2]], parts[::2], strict=True)}


def summary(text: str | None) -> str:
    """The first paragraph, on one line."""
    return " ".join(sections(text)[""].partition("\n\n")[0].split())


def entries(text: str | None, title: str) -> dict[str, str]:
    """The entries of a section such as Parameters: what is said of each name, on one line."""
    result: dict[str, list[str]] = {}
    names: list[str] = []
    for line in sections(text).get(title, "").splitlines():
        if line and not line[0].isspace():
            names = [name.strip() for name in line.partition(" :")[0].split(",")]
            result |= {name: [] for name in names}
        else:
            for name in names:
                result[name].append(line.strip())
    return {name: " ".join(filter(None, lines)) for name, lines in result.items()}


def of_module(name: str) -> str:
    """A module's docstring, read from its source: what the module needs may not be installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    with open(spec.origin, encoding="utf-8") as source:
        return ast.get_docstring(ast.parse(source.read())) or ""


def markdown(text: str) -> str:
    """A docstring's prose as Markdown: a literal block after ``::`` becomes a block of code."""
    return _LITERAL.sub(
        lambda match: f":\n\n```python\n{textwrap.dedent(match[1]).strip()}\n```\n\n", inspect.cleandoc(text)
    ).strip()
