"""The last hidden states of a frozen model on rows of text: computed when they are asked for, or stored once.

A folder of stored states has ``manifest.json`` and shards of safetensors, ``hidden_states`` ``[rows, tokens, hidden]``
in the dtype of the model. The manifest holds hashes of the model and of the text, and a checksum of each shard; a run
that was ended goes on with the shards that are missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..conversions.decoder import evaluating
from ..fingerprint import of_model

FORMAT = 1
MANIFEST = "manifest.json"


class OnlineStates:
    """Computes them when they are asked for, and remembers what there is room for.

    Parameters
    ----------
    rows
        ``[rows, tokens]`` token ids.
    remembered_bytes
        Room for hidden states in the CPU's memory: what was computed in one epoch is read in the next.
    """

    def __init__(self, model: Any, rows: torch.Tensor, remembered_bytes: int = 2**31) -> None:
        self._model = model
        self.rows = rows
        self._room, self._held = remembered_bytes, dict[int, torch.Tensor]()

    def __call__(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids ``[n, tokens]`` and hidden states ``[n, tokens, hidden]`` of some rows, on the model's device."""
        device, asked = self._model.device, indices.tolist()
        new = [index for index in asked if index not in self._held]
        found = {index: self._held[index].to(device) for index in asked if index in self._held}
        if new:
            with evaluating(self._model):
                states = self._model.base_model(self.rows[new].to(device), use_cache=False).last_hidden_state
            for index, row in zip(new, states, strict=True):
                found[index] = row
                if row.nbytes <= self._room:
                    self._room -= row.nbytes
                    self._held[index] = row.cpu().clone()
        return self.rows[indices].to(device), torch.stack([found[index] for index in asked])


def store_states(
    model: Any,
    rows: torch.Tensor,
    folder: str | Path,
    rows_per_shard: int = 16,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> StoredStates:
    """Compute the hidden states of every row once; shards that are there already stay.

    Parameters
    ----------
    rows
        ``[rows, tokens]`` token ids.
    progress
        Called with the shards that are done, and with how many there will be.

    Raises
    ------
    ValueError
        The folder holds the states of another model or of another text.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    identity = {**_identity(rows), "model": of_model(model), "rows_per_shard": rows_per_shard}
    manifest: dict[str, Any] = {**identity, "shards": {}}
    if (place / MANIFEST).exists():
        manifest = _read(place)
        _check(place, manifest, identity)
    compute = OnlineStates(model, rows)
    parts = torch.arange(len(rows)).split(rows_per_shard)
    for number, part in enumerate(parts):
        name = f"shard-{number:05}.safetensors"
        if name not in manifest["shards"] or not (place / name).exists():
            # renamed when it is whole: an end in between leaves no half a shard under its name
            unfinished = place / f".{name}"
            save_file({"hidden_states": compute(part)[1].cpu().contiguous()}, unfinished)
            unfinished.replace(place / name)
            manifest["shards"][name] = _checksum(place / name)
            (place / f".{MANIFEST}").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
            (place / f".{MANIFEST}").replace(place / MANIFEST)
        progress(number + 1, len(parts))
    return StoredStates(place, rows, model.device)


class StoredStates:
    """Reads what `store_states` wrote.

    Parameters
    ----------
    rows
        The same as there.

    Raises
    ------
    ValueError
        The folder belongs to another text, or a shard is missing or damaged.
    """

    def __init__(self, folder: str | Path, rows: torch.Tensor, device: torch.device | str = "cpu") -> None:
        place = Path(folder)
        manifest = _read(place)
        _check(place, manifest, _identity(rows))
        self._place, self._device = place, device
        self.rows = rows
        self._per_shard: int = manifest["rows_per_shard"]
        for number in range(-(-len(rows) // self._per_shard)):
            path = self._shard(number)
            if not path.exists() or _checksum(path) != manifest["shards"].get(path.name):
                raise ValueError(f"{path} is missing or damaged. Fix: delete it and run store_states again")

    def __call__(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `OnlineStates`."""
        found = [
            load_file(self._shard(index // self._per_shard))["hidden_states"][index % self._per_shard]
            for index in indices.tolist()
        ]
        return self.rows[indices].to(self._device), torch.stack(found).to(self._device)

    def _shard(self, number: int) -> Path:
        return self._place / f"shard-{number:05}.safetensors"


States = OnlineStates | StoredStates


def _identity(rows: torch.Tensor) -> dict[str, Any]:
    text = hashlib.sha256(rows.to(torch.int64).contiguous().numpy().tobytes()).hexdigest()
    return {"format": FORMAT, "shape": list(rows.shape), "text": text}


def _read(place: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{place} holds no stored hidden states ({error}). Fix: store_states writes them") from error
    return manifest


def _check(place: Path, manifest: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if manifest.get(name) != value:
            raise ValueError(
                f"{place} holds the hidden states of another {name} than this one. Fix: name another folder"
            )


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
