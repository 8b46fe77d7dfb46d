"""Where the command line writes, and what it shows while something takes its time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def errors() -> Console:
    """The console of messages that are not the output."""
    return Console(stderr=True, highlight=False)


class Working:
    """A line that says what is being done; `say` replaces it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("")
        self._said = ""

    def say(self, text: str) -> None:
        """Show what is being done now."""
        if text == self._said:
            return
        self._said = text
        self._progress.reset(self._task, description=text)
        if not self._console.is_terminal:
            self._console.print(f"{text} ...", markup=False, soft_wrap=True)

    def start(self) -> None:
        """Show the spinner, on a terminal."""
        if self._console.is_terminal:
            self._progress.start()

    def stop(self) -> None:
        """Remove the spinner; what follows may print."""
        if self._console.is_terminal:
            self._progress.stop()


@contextmanager
def working(console: Console, text: str) -> Iterator[Working]:
    """A spinner with the time that it has been turning; a plain line where the output is not a terminal."""
    line = Working(console)
    line.say(text)
    line.start()
    try:
        yield line
    finally:
        line.stop()
