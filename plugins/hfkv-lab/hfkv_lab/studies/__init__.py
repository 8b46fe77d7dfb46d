"""The ablations of the field, one command each: ``hfkv eval MODEL --study NAME``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .record import Study, Subject

# the modules of this package that have a `run`, and what each varies
STUDIES = {
    "axes": "keys and values grouped per channel or per token, at 2, 3 and 4 bits",
    "residual": "how many of the newest, and of the first, tokens stay in full precision",
    "group": "how many elements share a scale and an offset",
    "rope": "keys quantized before and after the rotary embedding",
    "granularity": "weights with a scale per tensor, per row, per group of 128, and nf4",
}
# those that look at weights alone, and read no text
WITHOUT_TEXT = frozenset({"granularity"})


def run(name: str, subject: Subject) -> Study:
    """Run a study.

    Raises
    ------
    ValueError
        No study of that name.
    """
    if name not in STUDIES:
        raise ValueError(f"--study {name!r} is not there. Choose from: {', '.join(STUDIES)}")
    study: Study = importlib.import_module(f"{__name__}.{name}").run(subject)
    return study
