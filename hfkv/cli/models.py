"""Load a model by folder, by Hub id, or out of a package that carries it."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from .packaged import PACKAGED, PackagedModel, check_gguf_reader, converted

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# seconds that the Hub has to answer
HUB_TIMEOUT = 5.0

DEFAULT = PACKAGED[0].hub


class DType(StrEnum):
    """What ``--dtype`` takes."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    AUTO = "auto"


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
        check_gguf_reader()
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
