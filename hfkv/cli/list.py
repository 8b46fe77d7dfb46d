"""``hfkv list``: what is there, what is not and why."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import inventory

COLORS = {"ok": "green", "missing": "yellow", "broken": "red"}


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Exit with 1 if a plugin is broken. A requirement that is missing is not a fault."
        ),
    ] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Show which kernel runs for each op, device, dtype and format.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="With --kernels: every candidate's reason.")] = False,
) -> None:
    """Show what is installed: plugins and what they provide, what is missing and why, whether autoload is active."""
    if explain and not kernels:
        raise typer.BadParameter("it explains the choice of kernels: add --kernels", param_hint="--explain")
    console = Console(highlight=False)
    found = inventory.inventory()
    if kernels:
        from . import kernels as choices

        found["kernels"] = choices.choices()
    if as_json:
        print(json.dumps(found, indent=2))
    elif kernels:
        choices.show(console, found["kernels"], explain)
    else:
        show(console, found)
    if strict and inventory.broken(found):
        raise typer.Exit(1)


def show(console: Console, found: dict[str, Any]) -> None:
    """Print the inventory as tables."""
    versions = found["versions"]
    console.print(", ".join(f"{name} {version or '(not installed)'}" for name, version in versions.items()))
    state = "[green]active[/]" if found["autoload"]["active"] else "[yellow]not active[/]"
    console.print(f"autoload is {state}: {escape(found['autoload']['reason'])}\n")
    console.print(_provided(found["plugins"]))
    console.print()
    console.print(_plugins(found["plugins"]))
    for problem in _problems(found["plugins"]):
        console.print()
        console.print(problem, soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _status(item: dict[str, Any]) -> str:
    return f"[{COLORS[item['status']]}]{item['status']}[/]"


def _origin(plugin: dict[str, Any]) -> str:
    """The distribution and its version; a plugin that a process registered itself has none."""
    return " ".join(part for part in (plugin["distribution"], plugin["version"]) if part) or "(no distribution)"


def _provided(plugins: list[dict[str, Any]]) -> Table:
    table = _table("kind", "name", "summary", "plugin", "status")
    for kind in inventory.KINDS.values():
        rows = [(spec, plugin) for plugin in plugins for spec in plugin["specs"] if spec["kind"] == kind]
        for index, (spec, plugin) in enumerate(rows):
            first = f"[dim]{kind}[/]" if index == 0 else ""
            table.add_row(first, spec["name"], escape(spec["summary"]), plugin["name"], _status(spec))
    return table


def _plugins(plugins: list[dict[str, Any]]) -> Table:
    table = _table("plugin", "distribution", "provides", "status")
    for plugin in plugins:
        counts: dict[str, int] = {}
        for spec in plugin["specs"]:
            counts[spec["kind"]] = counts.get(spec["kind"], 0) + 1
        provides = ", ".join(f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in counts.items())
        table.add_row(plugin["name"], _origin(plugin), provides or "nothing", _status(plugin))
    return table


def _problems(plugins: list[dict[str, Any]]) -> list[str]:
    """What is wrong, each with its fix on a line of its own."""
    texts = []
    for plugin in plugins:
        if plugin["error"]:
            texts.append(f"[red]plugin {plugin['name']} ({_origin(plugin)}) is broken:[/]\n  {escape(plugin['error'])}")
        for spec in plugin["specs"]:
            if spec["status"] == "ok":
                continue
            color = COLORS[spec["status"]]
            lines = [f"[{color}]{spec['kind']} {spec['name']} of plugin {plugin['name']} is {spec['status']}:[/]"]
            lines += [escape(problem) for problem in spec["problems"]]
            lines += [f"fix: {escape(spec['fix'])}"] if spec["fix"] else []
            texts.append("\n  ".join(lines))
    return texts
