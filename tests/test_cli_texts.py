"""The text that commands work on: from a file, a data set, or Python itself."""

from __future__ import annotations

import json

import pytest

from hfkv.cli.prompts import long_text
from hfkv.cli.texts import Text, read


def test_text_comes_from_one_place(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("hello", encoding="utf-8")
    assert read(file) == Text("hello", "mine.txt")
    assert read().content == long_text()
    with pytest.raises(ValueError, match="pass one of them"):
        read(file, "wikitext")
    file.write_text(" \n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"mine\.txt has no text"):
        read(file)


def test_text_of_a_data_set_is_its_field_of_the_split_that_was_held_back(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    for split, rows in {"train": ["seen"], "test": ["first", "second"]}.items():
        lines = [json.dumps({"text": row, "other": "x"}) for row in rows]
        (folder / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert read(None, str(folder)) == Text("first\nsecond", f"{folder}, test")
    assert read(None, str(folder), "other").content == "x\nx"
    with pytest.raises(ValueError, match=r"has no field 'body'; it has: text, other. Fix: --field"):
        read(None, str(folder), "body")
    assert read(None, str(folder), splits=("train",)) == Text("seen", f"{folder}, train")
    (folder / "test.jsonl").unlink()
    assert read(None, str(folder)) == Text("seen", f"{folder}, train")
    (folder / "train.jsonl").write_text('{"text": "seen"}\n' * 9, encoding="utf-8")
    assert read(None, str(folder), characters=5).content == "seen\nseen"
