"""A run that ends by the clock: its learning rate falls with the time that is left."""

from __future__ import annotations

import math
import time
from typing import Any

from transformers import TrainerCallback

# share of the run in which the learning rate rises
WARMUP = 0.05
# what is left of it in the end
FLOOR = 0.05


class Budget(TrainerCallback):
    """Stops after so many seconds of training, or so many steps; pauses (evaluation, saving) do not count.

    Parameters
    ----------
    seconds, steps
        One of them; the other is None.

    Attributes
    ----------
    spent
        Seconds so far.
    """

    def __init__(self, seconds: float | None, steps: int | None) -> None:
        if (seconds is None) == (steps is None):
            raise ValueError(f"seconds={seconds!r} and steps={steps!r}: exactly one of them sets the length of the run")
        if (seconds if steps is None else steps) <= 0:  # type: ignore[operator]
            raise ValueError(f"seconds={seconds!r} and steps={steps!r}: the run must have a length")
        self.seconds, self.steps = seconds, steps
        self.spent = 0.0
        self.step = 0
        self._since = 0.0

    @property
    def progress(self) -> float:
        """How much of the run is over, from 0 to 1."""
        done = self.step / self.steps if self.steps is not None else self.spent / (self.seconds or 1.0)
        return min(1.0, done)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the learning rate of the step."""
        for group in kwargs["optimizer"].param_groups:
            group["lr"] = args.learning_rate * rate(self.progress)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop where the time is over."""
        now = time.perf_counter()
        self.spent, self._since, self.step = self.spent + now - self._since, now, state.global_step
        if self.progress >= 1:
            control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What an evaluation took is not training."""
        self._since = time.perf_counter()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What saving took is not training."""
        self._since = time.perf_counter()


def rate(progress: float) -> float:
    """The learning rate's factor: up in a line, down in a cosine."""
    if progress < WARMUP:
        return FLOOR + (1 - FLOOR) * progress / WARMUP
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))
