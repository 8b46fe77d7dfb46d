"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from .budget import Budget
    from .run import Point

# seconds between the lines of a run that nobody watches
_PAUSE = 30.0


class Watch:
    """Shows a run: loss, KL, tokens per second and the time that is left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), TimeElapsedColumn(),
            TimeRemainingColumn(), console=console, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None)
        self._said = float("-inf")

    def __enter__(self) -> Watch:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def stage(self, text: str) -> None:
        """Say what is done now."""
        self._bar.reset(self._task, description=text, total=1.0 if text == "training" else None)
        if not self._console.is_terminal:
            self._console.print(f"{text} ...", markup=False)

    def show(self, budget: Budget, point: Point, speed: float) -> None:
        """Say how training goes."""
        kl = "" if point.kl is None else f"  KL {point.kl:.3f}"
        text = f"loss {point.loss:.3f}{kl}  {speed:,.0f} tokens/s"
        self._bar.update(self._task, completed=budget.progress, description=text)
        now = time.monotonic()
        if not self._console.is_terminal and (now - self._said > _PAUSE or budget.progress >= 1):
            left = budget.spent * (1 - budget.progress) / max(budget.progress, 1e-9)
            self._console.print(f"{text}  {left:,.0f} s left", markup=False)
            self._said = now
