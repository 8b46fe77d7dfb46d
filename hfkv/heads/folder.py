"""The folder that drafting heads are kept in: ``config.json`` and ``model.safetensors``.

``config.json`` says what kind they are and their shape::

    {"hfkv_heads": 1, "kind": "medusa", "config": {"hidden_size": 576, "vocab_size": 49152, "num_heads": 4, ...}}

``model.safetensors`` holds the module's own state; nothing of the model that they belong to.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from .. import registry
from .base import DraftHeads
from .eagle import EagleHead
from .medusa import MedusaHeads

VERSION = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"
KINDS: dict[str, type[DraftHeads]] = {cls.kind: cls for cls in (MedusaHeads, EagleHead)}


def save_heads(heads: DraftHeads, folder: str | Path) -> None:
    """Write heads into a folder, which is made where it is not there."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    record = {"hfkv_heads": VERSION, "kind": heads.kind, "config": dataclasses.asdict(heads.config)}
    (folder / CONFIG).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    state = {name: tensor.detach().contiguous() for name, tensor in heads.state_dict().items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


def load_heads(folder: str | Path, model: Any, kind: str | None = None) -> DraftHeads:
    """Heads from a folder, in the model's dtype and on its device.

    Parameters
    ----------
    folder
        What `save_heads` wrote.
    model
        The model that they belong to.
    kind
        The kind that is wanted; None takes any.

    Raises
    ------
    ValueError
        There are no heads in the folder, they are of another kind, they were made for a model of other sizes, or
        weights are missing or too many.
    """
    folder = Path(folder)
    found, config = _read_config(folder)
    if kind is not None and found != kind:
        raise ValueError(f"{folder} holds {found!r} heads, not {kind!r}: use the assistant {found!r}")
    cls = KINDS[found]
    fields = [field.name for field in dataclasses.fields(cls.Config)]
    registry.check_options(config, fields, "field", f"the config of {found!r} heads")
    heads = cls(cls.Config(**config))
    heads.check(model)
    state = load_file(folder / WEIGHTS)
    missing, unexpected = heads.load_state_dict(state, strict=False)
    if missing or unexpected:
        raise ValueError(f"{folder / WEIGHTS}: missing weights {missing}, unknown weights {unexpected}")
    return heads.to(device=model.device, dtype=model.dtype).eval()


def _read_config(folder: Path) -> tuple[str, dict[str, Any]]:
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} holds no drafting heads: there is no {CONFIG}. hfkv.heads.save_heads writes one")
    record = json.loads(path.read_text(encoding="utf-8"))
    version, kind = record.get("hfkv_heads"), record.get("kind")
    if version != VERSION or kind not in KINDS:
        raise ValueError(
            f"{path} says hfkv_heads={version!r}, kind={kind!r}; this hfkv reads hfkv_heads={VERSION} of the kinds "
            f"{', '.join(map(repr, KINDS))}"
        )
    return kind, record["config"]
