"""What several test files share: plugins as a user installs them, and tiny models that each test finds as new."""

from __future__ import annotations

import copy
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hfkv
from hfkv import registry

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def seed() -> None:
    """Let no test depend on how many random numbers the tests before it drew."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def tiny() -> Iterator[Callable[[str], object]]:
    """Give the tiny model of a family (`hfkv.testing.models`); what a test does to its generation config is undone.

    One thread: on sizes like these a second one costs more than it brings.
    """
    import torch

    from hfkv.testing.models import load

    touched, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)

    def give(family: str = "llama", attention: str = "sdpa") -> object:
        model = load(family, attention)
        touched.setdefault(id(model), (model.model, copy.deepcopy(model.model.generation_config)))
        return model

    yield give
    torch.set_num_threads(threads)
    for model, generation_config in touched.values():
        model.generation_config = generation_config


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model on disk, with a tokenizer whose tokens are bytes; nothing it says ends a text."""
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=256,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokens = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=tokens | {"<pad>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)
    return folder


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    """`hfkv.register` for the time of one test."""
    names = []

    def give(plugin: object, name: str) -> None:
        names.append(name)
        hfkv.register(plugin, name)

    yield give
    for name in names:
        registry.unregister(name)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Install a distribution with one plugin into a folder of the path, as pip leaves it; return the plugin's name."""

    def give(code: str, name: str | None = None, distribution: str | None = None, version: str = "1.0") -> str:
        number = next(_numbers)
        name = name or f"plugin{number}"
        distribution = distribution or f"dist{number}"
        folder = tmp_path / f"{number:04}"
        metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir(parents=True)
        (folder / f"hfkv_module{number}.py").write_text("import hfkv\n" + textwrap.dedent(code))
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (metadata / "entry_points.txt").write_text(f"[hfkv]\n{name} = hfkv_module{number}\n")
        monkeypatch.syspath_prepend(folder)
        return name

    return give
