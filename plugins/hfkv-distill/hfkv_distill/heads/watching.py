"""How far a training of heads is: a bar on a terminal, a line for each simulated acceptance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from . import training


class Watch:
    """Shows what `train_heads` logs.

    Attributes
    ----------
    simulated
        The points of the curve: seconds, step, tokens, loss since the last one, accepted tokens.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=1.0)
        self._losses: list[float] = []
        self.simulated: list[dict[str, Any]] = []

    def start(self) -> None:
        """Show the bar, on a terminal."""
        self._bar.start()

    def stop(self) -> None:
        """Remove the bar."""
        self._bar.stop()

    def log(self, progress: training.Progress) -> None:
        """One step; a line where the acceptance was simulated."""
        if progress.step:
            self._losses.append(progress.loss)
        speed = progress.tokens / progress.seconds if progress.seconds else 0.0
        self._bar.update(
            self._task, completed=progress.share, description=f"loss {progress.loss:.3f}, {speed:,.0f} tokens/s"
        )
        if progress.accepted is None:
            return
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        self._losses.clear()
        self.simulated.append(
            {
                "seconds": round(progress.seconds, 1),
                "step": progress.step,
                "tokens": progress.tokens,
                "loss": loss,
                "tokens_per_verification": progress.accepted,
            }
        )
        shown = "" if loss is None else f"loss {loss:.3f}, "
        self._console.print(
            f"{progress.seconds:5.0f} s  step {progress.step:>5}  {shown}{speed:,.0f} tokens/s, "
            f"simulated {progress.accepted:.3f} tokens per forward",
            markup=False,
            soft_wrap=True,
        )


@contextmanager
def watched(console: Console) -> Iterator[Watch]:
    """A watch for the time of a training."""
    watch = Watch(console)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
