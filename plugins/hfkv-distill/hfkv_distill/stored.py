"""A teacher's likeliest outcomes, stored once and read in every epoch.

A folder has ``manifest.json`` and shards of safetensors: ``indices`` int32 ``[targets, k]``, ``log_probabilities``
float32 ``[targets, k + 1]`` (the last is all other outcomes together) and ``offsets``, where each example begins. The
manifest says what they belong to (hashes of the data, of the tokenizer and of the teacher), with a checksum of each.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset

from . import fingerprint
from .collator import IGNORED, DistillationCollator
from .head import OutputHead
from .losses import TopK
from .targets import Targets

FORMAT = 1
_MANIFEST = "manifest.json"


def store_teacher_logits(
    teacher_model: Any,
    dataset: Sequence[Mapping[str, Any]],
    folder: str | Path,
    *,
    processing_class: Any = None,
    top_k: int = 64,
    temperature: float = 1.0,
    vocabulary: int | None = None,
    examples_per_shard: int = 64,
    batch_size: int = 8,
    chunk_size: int = 256,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> StoredLogits:
    """Run a teacher over a data set once, and keep what it says; shards that are there already stay.

    Parameters
    ----------
    dataset
        Examples as for `DistillationCollator`, with a length.
    processing_class
        The tokenizer that the data was made with.
    top_k
        Outcomes of each target that are kept; all others are one bucket.
    temperature
        That of the loss: of a bucket it cannot be changed afterwards.
    vocabulary
        Outcomes that the student knows too: the first of the teacher's; by default all.
    progress
        Called with the shards that are done, and with how many there will be.

    Returns
    -------
    StoredLogits
        The data set with the teacher, for `DistillationTrainer`.

    Raises
    ------
    ValueError
        The folder belongs to other data, another tokenizer or teacher, or other settings.
    """
    place, collate = Path(folder), DistillationCollator()
    head = OutputHead(teacher_model)
    known = head.size if vocabulary is None else vocabulary
    if not 1 <= top_k <= known <= head.size:
        raise ValueError(f"top_k={top_k!r} must be from 1 to vocabulary={known!r}, and that at most {head.size}")
    identity = {
        "format": FORMAT,
        "data": fingerprint.of_data(dataset, collate),
        "tokenizer": fingerprint.of_tokenizer(processing_class),
        "teacher": fingerprint.of_model(teacher_model),
        "top_k": top_k,
        "temperature": temperature,
        "vocabulary": known,
        "examples": len(dataset),
        "examples_per_shard": examples_per_shard,
    }
    place.mkdir(parents=True, exist_ok=True)
    manifest = {**identity, "shards": {}}
    if (place / _MANIFEST).exists():
        manifest = _read_manifest(place)
        _check_identity(place, manifest, identity)
    starts = range(0, len(dataset), examples_per_shard)
    for number, start in enumerate(starts):
        name = f"shard-{number:05}.safetensors"
        if name not in manifest["shards"] or not (place / name).exists():
            rows = [dataset[index] for index in range(start, min(start + examples_per_shard, len(dataset)))]
            tensors = _computed(teacher_model, head, rows, collate, (top_k, temperature, known), batch_size, chunk_size)
            unfinished = place / f".{name}"
            save_file(tensors, unfinished)
            unfinished.replace(place / name)
            manifest["shards"][name] = _checksum(place / name)
            _write_manifest(place, manifest)
        progress(number + 1, len(starts))
    return StoredLogits(place, dataset, processing_class=processing_class)


@torch.no_grad()
def _computed(
    teacher: Any, head: OutputHead, rows: list[Any], collate: Any, kept: tuple[int, float, int], batch_size: int,
    chunk_size: int,
) -> dict[str, torch.Tensor]:  # fmt: skip
    top_k, temperature, vocabulary = kept
    found: list[TopK] = []
    lengths: list[int] = []
    training = teacher.training
    teacher.eval()
    try:
        for start in range(0, len(rows), batch_size):
            inputs = {k: v.to(teacher.device) for k, v in collate(rows[start : start + batch_size]).items()}
            targets = Targets(inputs["labels"])
            theirs = targets.of_teacher(inputs)
            prefix = "teacher_" if "teacher_input_ids" in inputs else ""

            def see(hidden_states: torch.Tensor, way: Callable[..., Any], theirs: Targets = theirs) -> None:
                for chunk in theirs.before(hidden_states).split(chunk_size):
                    found.append(TopK.of(way(chunk)[..., :vocabulary], top_k, temperature))

            with head.taken(see):
                arguments = {name: inputs[f"{prefix}{name}"] for name in ("input_ids", "attention_mask")}
                teacher(**arguments, use_cache=False)
            lengths += (inputs["labels"][:, 1:] != IGNORED).sum(dim=1).tolist()
    finally:
        teacher.train(training)
    empty = TopK(torch.zeros(0, top_k, dtype=torch.long), torch.zeros(0, top_k + 1))
    return {
        "indices": torch.cat([part.indices.cpu() for part in [empty, *found]]).to(torch.int32),
        "log_probabilities": torch.cat([part.log_probabilities.float().cpu() for part in [empty, *found]]),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
    }


class StoredLogits(Dataset[dict[str, Any]]):
    """A data set whose examples carry what the teacher said of them.

    Parameters
    ----------
    folder
        What `store_teacher_logits` wrote.
    dataset
        The data that it was written for.
    processing_class
        The tokenizer, where it was stored with one.

    Attributes
    ----------
    temperature, vocabulary
        What the stored probabilities are of.

    Raises
    ------
    ValueError
        A shard that is missing or damaged, or a folder that belongs to other data or to another tokenizer.
    """

    def __init__(
        self, folder: str | Path, dataset: Sequence[Mapping[str, Any]], *, processing_class: Any = None
    ) -> None:
        self._folder, self._dataset = Path(folder), dataset
        manifest = _read_manifest(self._folder)
        expected = {"format": FORMAT, "data": fingerprint.of_data(dataset, DistillationCollator())}
        if processing_class is not None:
            expected["tokenizer"] = fingerprint.of_tokenizer(processing_class)
        _check_identity(self._folder, manifest, expected)
        self.temperature: float = manifest["temperature"]
        self.vocabulary: int = manifest["vocabulary"]
        self.teacher: str = manifest["teacher"]
        self._per_shard: int = manifest["examples_per_shard"]
        shards: dict[str, str] = manifest["shards"]
        expected_count = -(-manifest["examples"] // self._per_shard)
        if len(shards) < expected_count:
            raise ValueError(
                f"{folder} has {len(shards)} of {expected_count} shards. Fix: run store_teacher_logits again"
            )
        self._shards = [self._folder / name for name in sorted(shards)]
        for path in self._shards:
            if not path.exists():
                raise ValueError(f"{path} is missing. Fix: run store_teacher_logits again, which makes it anew")
            if _checksum(path) != shards[path.name]:
                raise ValueError(
                    f"{path} is damaged: its checksum is not the one of {_MANIFEST}. Fix: delete this file and run "
                    "store_teacher_logits again, which makes it anew"
                )

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """An example, with ``teacher_indices`` and ``teacher_log_probabilities`` at the places of its labels."""
        example = dict(self._dataset[index])
        labels = DistillationCollator()([example])["labels"][0]
        shard, place = divmod(index, self._per_shard)
        with safe_open(self._shards[shard], framework="pt") as file:
            offsets = file.get_tensor("offsets")
            rows = slice(int(offsets[place]), int(offsets[place + 1]))
            indices = file.get_slice("indices")[rows].long()
            log_probabilities = file.get_slice("log_probabilities")[rows]
        learned = labels != IGNORED
        for name, values in (("teacher_indices", indices), ("teacher_log_probabilities", log_probabilities)):
            spread = values.new_zeros(len(labels), values.shape[1])
            spread[learned] = values
            example[name] = spread
        return example


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no stored teacher: there is no {_MANIFEST}") from None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{folder / _MANIFEST} is damaged ({error}). Fix: delete the folder and store again"
        ) from error
    return manifest


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    unfinished = folder / f".{_MANIFEST}"
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / _MANIFEST)


def _check_identity(folder: Path, manifest: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        if manifest.get(name) == value:
            continue
        if name in ("data", "tokenizer", "teacher"):
            raise ValueError(
                f"{folder} was stored for other {name}" if name == "data" else f"{folder} was stored for another {name}"
            )
        raise ValueError(f"{folder} was stored with {name}={manifest.get(name)!r}, not {value!r}. Fix: another folder")


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
