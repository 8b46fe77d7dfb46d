"""What a tuning has measured so far, on disk after each measurement: an interrupted run goes on where it was."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .scoring import Score


class State:
    """Scores by what was scored; a file holds them, or nothing does.

    Parameters
    ----------
    about
        What the scores are of: model, text, versions. A file of something else is refused.
    """

    def __init__(self, path: Path | None, about: Mapping[str, Any]) -> None:
        self._path = path
        self._about = json.loads(json.dumps(about))
        self._scores: dict[str, Score] = {}
        self.resumed = 0
        if path is not None and path.exists():
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            about, scores = stored["about"], stored["scores"]
            self._scores = {
                key: Score(tuple(score["same"]), tuple(score["sums"]), tuple(score["counts"]))
                for key, score in scores.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} holds no measurements of tune: {error}. Fix: remove it, or pass --fresh"
            ) from error
        different = [key for key in self._about if about.get(key) != self._about[key]]
        if different:
            raise ValueError(
                f"{path} holds measurements of another run ({', '.join(different)} differ). "
                "Fix: pass --fresh to measure anew, or another --out"
            )
        self.resumed = len(self._scores)

    def score(self, text: str, options: Mapping[str, Any], measure: Callable[[], Score]) -> Score:
        """The score of a cache on a text, measured where it is not known yet."""
        key = json.dumps([text, options], sort_keys=True)
        if key not in self._scores:
            self._scores[key] = measure()
            self._save()
        return self._scores[key]

    def _save(self) -> None:
        if self._path is None:
            return
        scores = {key: dataclasses.asdict(score) for key, score in self._scores.items()}
        beside = self._path.with_suffix(".part")
        beside.write_text(json.dumps({"about": self._about, "scores": scores}), encoding="utf-8")
        beside.replace(self._path)
