"""The Python on the pages runs, and prints what the pages say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DOCS = Path(__file__).resolve().parents[1] / "docs"
sys.path.append(str(DOCS))

from sitegen import runnable  # noqa: E402

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PAGES = sorted(page for page in DOCS.rglob("*.md") if runnable.blocks(page.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A local Hub cache: under the id that the pages load, a tiny random model whose keys have the real one's shape."""
    cache = tmp_path_factory.mktemp("hub")
    repository = cache / f"models--{HUB_ID.replace('/', '--')}"
    revision = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    snapshot = repository / "snapshots" / revision
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "?": 2, "the": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>").save_pretrained(snapshot)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=30, num_attention_heads=3,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, eos_token_id=None, bos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(snapshot)
    return cache


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs(page, hub, tmp_path):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HFKV_")}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(DOCS / "sitegen" / "runnable.py"), str(page)]
    if Version(transformers.__version__) < Version("5.24"):
        command += ["cache=cache=>past_key_values=cache", "output.cache=>output.past_key_values"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    expected = sum(block.reason is None for block in runnable.blocks(page.read_text(encoding="utf-8")))
    assert done.stdout == f"{expected} blocks ran\n"


def test_every_python_block_is_found():
    # a fence with other words after it, or indented, would be shown and not run
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.count("```python") == len(runnable.blocks(text)), page.name
        assert text.count('title="output"') == sum(block.output is not None for block in runnable.blocks(text)), (
            page.name
        )


def test_wrong_output_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text('```python\nprint(1)\n```\n\n```text title="output"\n2\n```\n', encoding="utf-8")
    command = [sys.executable, str(DOCS / "sitegen" / "runnable.py"), str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "page.md, line 2: printed" in done.stderr
