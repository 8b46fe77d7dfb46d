"""README.md says what is: its example runs and prints what it shows, its table and its links are right."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hfkv
from hfkv import registry
from hfkv.cli import readme
from hfkv.cli.app import OWN

TEXT = (readme.ROOT / "README.md").read_text(encoding="utf-8")


def test_example_prints_what_is_shown():
    code, output = readme.example(TEXT)
    assert readme.run(code) == output


def test_example_is_ten_lines():
    code, _ = readme.example(TEXT)
    assert len([line for line in code.splitlines() if line]) <= 10


def test_table_of_plugins_is_fresh():
    assert readme.plugins() in TEXT, "run python -m hfkv.cli.readme --write"
    assert len(readme.TABLE.findall(TEXT)) == 1


def test_table_has_a_row_for_a_new_plugin_folder(tmp_path):
    shutil.copytree(readme.ROOT / "plugins" / "hfkv-kivi", tmp_path / "plugins" / "hfkv-kivi")
    added = tmp_path / "plugins" / "hfkv-new"
    (added / "hfkv_new").mkdir(parents=True)
    (added / "pyproject.toml").write_text('[project]\nname = "hfkv-new"\ndescription = "something new"\n')
    (added / "hfkv_new" / "plugin.py").write_text(
        "import hfkv\n\n@hfkv.hookimpl\ndef hfkv_assistants():\n"
        "    yield hfkv.AssistantSpec(name='fresh', summary='x', load='hfkv_new.a:b')\n"
    )
    *_, kivi, new = readme.plugins(tmp_path).splitlines()
    assert kivi in readme.plugins().splitlines()
    assert new == "| [`hfkv[new]`](plugins/hfkv-new) | assistant `fresh` | something new |"
    (added / "hfkv_new" / "plugin.py").write_text("import hfkv\n\n@hfkv.hookimpl\ndef hfkv_assistant():\n    yield\n")
    with pytest.raises(ValueError, match="hfkv_assistants"):
        readme.plugins(tmp_path)


def test_outdated_parts_are_replaced(monkeypatch):
    # the example itself is run by the first test
    monkeypatch.setattr(readme, "run", lambda code: "made anew\n")
    outdated = readme.TABLE.sub("no table", TEXT)
    assert "no table" in outdated
    assert readme.TABLE.search(readme.updated(outdated))[0] == readme.plugins()
    assert readme.example(readme.updated(outdated))[1] == "made anew\n"


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)]+)\)", TEXT))))
def test_link_leads_somewhere(link):
    assert "://" not in link
    assert (readme.ROOT / link).exists()


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", TEXT, re.MULTILINE))
def test_make_target_exists(target):
    makefile = (readme.ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_every_command_shown_is_one():
    shown = set(re.findall(r"^hfkv ([\w-]+)", TEXT, re.MULTILINE))
    assert shown == OWN.keys() | registry.manager().specs(hfkv.SubcommandSpec).keys()


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, pad_token_id=0, **sizes)).eval()


def test_what_can_be_named_can(tiny, tmp_path):
    tiny.save_pretrained(tmp_path)
    code = TEXT.partition("## What can be named")[2].partition("```python\n")[2].partition("```")[0]
    inputs = {"input_ids": torch.ones(1, 3, dtype=torch.long), "max_new_tokens": 3}
    names = {"hfkv": hfkv, "AutoModelForCausalLM": AutoModelForCausalLM, "model": tiny, "inputs": inputs}
    exec(code, names | {"name": str(tmp_path)})
    extras = re.findall(r"hfkv\[(\w+)\]", code)
    assert len(extras) > 6
    assert all((readme.ROOT / "plugins" / f"hfkv-{name}").exists() for name in extras)
