"""How far a measurement is: a bar on a terminal, a line for each part elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Steps:
    """A bar with a known number of steps; `step` names what starts, `done` counts it."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total)
        self._said = ""

    def start(self) -> None:
        """Show the bar, on a terminal."""
        if self._console.is_terminal:
            self._bar.start()

    def stop(self) -> None:
        """Remove the bar."""
        if self._console.is_terminal:
            self._bar.stop()

    def step(self, text: str) -> None:
        """Say what is being done now."""
        self._bar.update(self._task, description=text)
        if not self._console.is_terminal and text != self._said:
            self._console.print(f"{text} ...", markup=False, soft_wrap=True)
        self._said = text

    def done(self, count: int = 1) -> None:
        """Count steps that are over."""
        self._bar.advance(self._task, count)

    def expect(self, total: int) -> None:
        """Change how many steps there are, where that was not known at the start."""
        self._bar.update(self._task, total=total)


@contextmanager
def steps(console: Console, total: int) -> Iterator[Steps]:
    """A bar for the time of a measurement."""
    bar = Steps(console, total)
    bar.start()
    try:
        yield bar
    finally:
        bar.stop()


class Silent:
    """Steps that nobody watches: the default of the functions behind the commands."""

    def step(self, text: str) -> None:
        """Say nothing."""

    def done(self, count: int = 1) -> None:
        """Count nothing."""

    def expect(self, total: int) -> None:
        """Expect nothing."""


Watcher = Steps | Silent
