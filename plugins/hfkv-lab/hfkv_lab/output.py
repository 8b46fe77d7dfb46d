"""Where a command's page goes: tables to the terminal, JSON to stdout, the report to a file."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from .page import Page, Table

_NUMBER = re.compile(r"[-+±<>~≤≥]?\s*\d[\d,]*(\.\d+)?(e[-+]?\d+)?\s*([%x×]|[A-Za-zµ/]+)?(\s*±.*)?\*?|-|")


def console(as_json: bool) -> Console:
    """Where messages and tables go; with ``--json``, stdout is the result's alone."""
    return Console(highlight=False, file=sys.stderr if as_json else sys.stdout)


def check_report(report: Path | None) -> None:
    """Raise ValueError before anything is measured where the report could not be written in the end."""
    if report is not None and not report.absolute().parent.is_dir():
        raise ValueError(f"--report {report}: there is no folder {report.absolute().parent}. Fix: make it first")


def finish(out: Console, page: Page, *, as_json: bool, report: Path | None) -> None:
    """Show a page on the terminal or print its data as JSON; and write the report."""
    if as_json:
        print(json.dumps(plain(page.data), indent=2))
    else:
        show(out, page)
    if report is not None:
        from .report import html

        report.write_text(html(page), encoding="utf-8")
        out.print(f"report: {report}", markup=False, soft_wrap=True)


def plain(data: Any) -> Any:
    """Dataclasses, paths and tuples as what JSON has; numbers that JSON lacks as None."""
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return {field.name: plain(getattr(data, field.name)) for field in dataclasses.fields(data)}
    if isinstance(data, dict):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    if isinstance(data, float) and (data != data or data in (float("inf"), float("-inf"))):
        return None
    if isinstance(data, Path):
        return str(data)
    return data


def show(out: Console, page: Page) -> None:
    """Print the facts and the tables; figures are for the report."""
    out.print(f"[bold]{escape(page.title)}[/]")
    for name, value in page.facts.items():
        out.print(f"[dim]{escape(name)}:[/] {escape(value)}", soft_wrap=True)
    for part in page.parts:
        if isinstance(part, Table):
            _show(out, part)


def _show(out: Console, part: Table) -> None:
    out.print(f"\n[bold]{escape(part.title)}[/]")
    table = RichTable(header_style="bold", pad_edge=False, box=None, padding=(0, 2, 0, 0))
    for header, right in zip(part.header, right_columns(part), strict=True):
        table.add_column(escape(header), justify="right" if right else "left", overflow="fold")
    for row in part.rows:
        table.add_row(*map(escape, row))
    out.print(table)
    for note in part.notes:
        out.print(note, style="dim", markup=False)


def right_columns(part: Table) -> list[bool]:
    """Which columns hold numbers."""
    columns = list(zip(*part.rows, strict=True)) or [()] * len(part.header)
    return [bool(any(cells)) and all(_NUMBER.fullmatch(cell) for cell in cells) for cells in columns]
