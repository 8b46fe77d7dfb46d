"""What a run that was killed needs to go on: checkpoints, the time it has spent, its curve, what was measured before.

A checkpoint of `Trainer` has the weights, the optimizer, the random numbers and the place in the data. Beside it stands
what is ours, written last: a checkpoint without it was cut short, and the one before it counts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from .budget import Budget
    from .run import Curve

# in the folder of a run: what it is; and what has been measured before training
_RUN, _MEASURED = "run.json", "measured.json"
# in a checkpoint
_PROGRESS = "progress.json"


class Unfinished:
    """A run's folder.

    Parameters
    ----------
    folder
        Made where it is not there.
    minutes
        How often a checkpoint is saved; two are kept.
    settings
        What the run is, as JSON has it: a run of other settings does not go on with this one.

    Raises
    ------
    ValueError
        The run in the folder is another one.
    """

    def __init__(self, folder: Path, minutes: float, settings: Mapping[str, Any]) -> None:
        self.folder, self.minutes = folder, minutes
        asked = json.loads(json.dumps(settings))
        if not (folder / _RUN).exists():
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder / _RUN, asked)
            return
        begun = json.loads((folder / _RUN).read_text(encoding="utf-8"))
        differing = sorted(key for key in {*begun, *asked} if begun.get(key) != asked.get(key))
        if differing:
            listed = ", ".join(f"{key} was {begun.get(key)!r} and is {asked.get(key)!r}" for key in differing)
            raise ValueError(
                f"{folder} has the beginning of another run: {listed}. Fix: the same settings, which go on with it; or "
                "another folder for the result"
            )
        # one that was cut short would be counted among the two that are kept
        for path in folder.glob("checkpoint-*"):
            if not (path / _PROGRESS).exists():
                shutil.rmtree(path)

    def measured(self) -> dict[str, Any] | None:
        """What was measured before training; None where it has not been."""
        path = self.folder / _MEASURED
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def keep_measured(self, found: Mapping[str, Any]) -> None:
        """Remember it."""
        _write(self.folder / _MEASURED, found)

    def latest(self) -> Path | None:
        """The newest checkpoint that is whole; None without one."""
        whole = [path.parent for path in self.folder.glob(f"checkpoint-*/{_PROGRESS}")]
        return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


class Saving(TrainerCallback):
    """Saves checkpoints by the clock, and takes up a budget and a curve where the newest one left them."""

    def __init__(self, unfinished: Unfinished, budget: Budget, curve: Curve) -> None:
        self._unfinished, self._budget, self._curve = unfinished, budget, curve
        self._saved = time.perf_counter()

    def take_up(self, checkpoint: Path) -> None:
        """Put the budget and the curve where they were."""
        progress = json.loads((checkpoint / _PROGRESS).read_text(encoding="utf-8"))
        self._budget.spent, self._budget.step = progress["spent"], progress["step"]
        self._curve.take_up(progress["curve"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._saved = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for a checkpoint where it is time."""
        if time.perf_counter() - self._saved >= 60 * self._unfinished.minutes:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what is ours beside a checkpoint that is whole."""
        curve = [dataclasses.asdict(point) for point in self._curve.points]
        progress = {"spent": self._budget.spent, "step": self._budget.step, "curve": curve}
        _write(Path(args.output_dir) / f"checkpoint-{state.global_step}" / _PROGRESS, progress)
        self._saved = time.perf_counter()


def _write(path: Path, data: Any) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)
