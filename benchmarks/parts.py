"""A saved table that is measured in parts: each run fills some columns of some rows, and the others stay.

The file is one of ``docs/benchmarks``. Besides what is shown it keeps its ``runs``: which part was measured for which
rows, where, with which versions and options. Head and command are made from them, so they are true of every row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """One part, measured for some rows.

    Attributes
    ----------
    part
        What was measured.
    machine
        Where.
    versions
        Of the libraries that decide the figures.
    options
        Those of the command: the same for all rows, or one command could not measure the table.
    rows
        The names of the rows.
    """

    part: str
    machine: str
    versions: Mapping[str, str]
    options: Mapping[str, Any]
    rows: Sequence[str] = ()

    def without(self, names: Iterable[str]) -> Run:
        """The run, for rows that were not measured again."""
        gone = set(names)
        return self.of([name for name in self.rows if name not in gone])

    def of(self, rows: Sequence[str]) -> Run:
        """The run, for other rows."""
        return Run(self.part, self.machine, self.versions, self.options, rows)

    def same_but_rows(self, other: Run) -> bool:
        """Whether the two differ in their rows alone."""
        return self.of(()) == other.of(())


class PartTable:
    """A table and its runs, in a file or in none yet.

    Parameters
    ----------
    path
        The file.
    key
        The column that names a row.
    columns
        Every column and its head, in order; a figure that was not measured is ``"-"``.
    order
        Names of rows, in their order; other rows follow as they came.

    Raises
    ------
    ValueError
        The file has a table that was not made so.
    """

    def __init__(self, path: Path, key: str, columns: Mapping[str, str], order: Sequence[str]) -> None:
        self.path, self.key, self.columns, self.order = path, key, columns, order
        saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": [], "runs": []}
        if "runs" not in saved:
            raise ValueError(f"{path} does not say in which runs its rows were measured. Fix: another file")
        self.rows = {row[key]: {name: row.get(name, "-") for name in columns} for row in saved["rows"]}
        self.runs = [Run(**run) for run in saved["runs"]]

    def check(self, run: Run, names: Iterable[str]) -> None:
        """Refuse a run whose options are not those of the rows that stay.

        Raises
        ------
        ValueError
            Naming the option.
        """
        for old in (each.without(names) for each in self.runs if each.part == run.part):
            differing = [name for name in run.options if old.rows and old.options[name] != run.options[name]]
            if differing:
                name = differing[0]
                raise ValueError(
                    f"{self.path}: {run.part} of {old.rows[0]} was measured with {name}={old.options[name]}, and this "
                    f"run has {name}={run.options[name]}. Fix: the same {name}, another file, or all rows at once"
                )

    def put(self, run: Run, name: str, found: Mapping[str, Any]) -> None:
        """Take what a run found for a row, in place of what was there."""
        kept = [old.without([name]) if old.part == run.part else old for old in self.runs]
        place = next((index for index, old in enumerate(kept) if old.same_but_rows(run)), None)
        if place is None:
            kept.append(run.of([name]))
        else:
            kept[place] = run.of(self._sorted([*kept[place].rows, name]))
        self.runs = [old for old in kept if old.rows]
        empty = dict.fromkeys(self.columns, "-") | {self.key: name}
        self.rows[name] = {**self.rows.get(name, empty), **found}

    def _sorted(self, names: Iterable[str]) -> list[str]:
        known = {name: index for index, name in enumerate(self.order)}
        return sorted(names, key=lambda name: known.get(name, len(known)))

    def options(self, part: str) -> Mapping[str, Any]:
        """Those that a part was measured with; empty where it was not measured."""
        return next((run.options for run in self.runs if run.part == part), {})

    @property
    def names(self) -> list[str]:
        """The rows' names, in order."""
        return self._sorted(self.rows)

    def machines(self) -> str:
        """Where each part was measured, in sentences."""
        at: dict[str, list[str]] = {}
        for run in self.runs:
            alone = [each.part for each in self.runs].count(run.part) == 1
            at.setdefault(run.machine, []).append(run.part if alone else f"{run.part} of {', '.join(run.rows)}")
        said = (f"{' and '.join(parts)} on {machine}." for machine, parts in at.items())
        return " ".join(sentence[0].upper() + sentence[1:] for sentence in said)

    def save(self, **shown: Any) -> dict[str, Any]:
        """Write the file and return what is in it; ``shown`` is what the table says besides its rows."""
        versions: dict[str, list[str]] = {}
        for run in self.runs:
            for name, version in run.versions.items():
                versions[name] = list(dict.fromkeys([*versions.get(name, []), version]))
        table = {
            **shown,
            "versions": {name: " and ".join(found) for name, found in versions.items()},
            "columns": dict(self.columns),
            "rows": [self.rows[name] for name in self.names],
            "runs": [asdict(run) for run in self.runs],
        }
        self.path.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return table
