"""A stored teacher: what training with it gives, and what it refuses."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from hfkv_distill import StoredLogits, store_teacher_logits


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


@pytest.mark.parametrize("objective", [{}, {"beta": 0.5, "temperature": 2.0, "alpha": 0.2}, {"beta": 1.0}])
def test_all_outcomes_stored_train_as_the_teacher_does(trainer, llama, ragged, tmp_path, objective):
    rows = ragged(8)
    # Adam makes steps of gradients that are nothing but rounding
    plain = {"optim": "sgd", "learning_rate": 0.1}
    online = trainer(data=rows, **objective, **plain)
    before = weights(online)
    online.train()
    assert (weights(online) - before).abs().max() > 1e-2
    stored = store_teacher_logits(
        llama(0), rows, tmp_path / "teacher", top_k=48, temperature=objective.get("temperature", 1.0),
        examples_per_shard=3, batch_size=2, chunk_size=5,
    )  # fmt: skip
    offline = trainer(teacher=None, data=stored, **objective, **plain)
    offline.train()
    assert losses(offline) == pytest.approx(losses(online), rel=1e-5)
    assert (weights(offline) - weights(online)).abs().max() < 1e-6


def test_few_outcomes_are_near(trainer, llama, ragged, tmp_path):
    rows = ragged(8)
    online = trainer(data=rows)
    online.train()
    found = []
    for k in (4, 24):
        offline = trainer(teacher=None, data=store_teacher_logits(llama(0), rows, tmp_path / str(k), top_k=k))
        offline.train()
        found.append(abs(losses(offline)[0] - losses(online)[0]))
    assert 0 < found[1] < found[0] < 0.5 * losses(online)[0]


def test_bytes_are_those_of_what_is_kept(llama, ragged, tmp_path):
    rows = ragged(8)
    store_teacher_logits(llama(0), rows, tmp_path / "teacher", top_k=6, examples_per_shard=4)
    targets = sum(int((row["labels"][1:] != -100).sum()) for row in rows)
    size = sum(path.stat().st_size for path in (tmp_path / "teacher").glob("*.safetensors"))
    kept = targets * (6 * 4 + 7 * 4) + 2 * 5 * 8
    assert kept <= size < kept + 2 * 400


def test_interrupted_it_goes_on_where_it_was(llama, ragged, tmp_path):
    rows, folder, done = ragged(8), tmp_path / "teacher", []

    def interrupt(shards, total):
        done.append((shards, total))
        if shards == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store_teacher_logits(llama(0), rows, folder, top_k=6, examples_per_shard=2, progress=interrupt)
    assert done == [(1, 4), (2, 4)]
    with pytest.raises(ValueError, match="2 of 4 shards"):
        StoredLogits(folder, rows)
    first = (folder / "shard-00000.safetensors").stat().st_mtime_ns
    stored = store_teacher_logits(llama(0), rows, folder, top_k=6, examples_per_shard=2)
    assert (folder / "shard-00000.safetensors").stat().st_mtime_ns == first
    whole = store_teacher_logits(llama(0), rows, tmp_path / "whole", top_k=6, examples_per_shard=2)
    for one, other in zip(stored, whole, strict=True):
        for name, value in one.items():
            assert torch.equal(value, other[name])


@pytest.fixture
def folder(llama, ragged, tmp_path):
    store_teacher_logits(llama(0), ragged(8), tmp_path / "teacher", top_k=6, examples_per_shard=4)
    return tmp_path / "teacher"


def test_damaged_shard_is_named(folder, ragged, llama):
    path = folder / "shard-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors is damaged"):
        StoredLogits(folder, ragged(8))
    path.unlink()
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors is missing"):
        StoredLogits(folder, ragged(8))
    # what the message says mends it
    assert len(store_teacher_logits(llama(0), ragged(8), folder, top_k=6, examples_per_shard=4)) == 8


def test_other_data_is_refused(folder, ragged):
    rows = ragged(8)
    rows[3]["labels"][-1] = -100
    for other in (rows, ragged(8, seed=1), ragged(7)):
        with pytest.raises(ValueError, match="stored for other data"):
            StoredLogits(folder, other)


def test_another_teacher_is_refused(folder, ragged, llama):
    with pytest.raises(ValueError, match="stored for another teacher"):
        store_teacher_logits(llama(5), ragged(8), folder, top_k=6, examples_per_shard=4)


@pytest.mark.parametrize("change", [{"top_k": 7}, {"temperature": 2.0}, {"vocabulary": 40}])
def test_other_settings_are_refused(folder, ragged, llama, change):
    settings = {"top_k": 6, "examples_per_shard": 4, **change}
    with pytest.raises(ValueError, match=next(iter(change))):
        store_teacher_logits(llama(0), ragged(8), folder, **settings)


def test_another_tokenizer_is_refused(ragged, llama, tmp_path):
    class Words:
        def __init__(self, **vocabulary):
            self.get_vocab = lambda: vocabulary

    folder = tmp_path / "teacher"
    store_teacher_logits(llama(0), ragged(8), folder, processing_class=Words(a=0, b=1), top_k=6)
    StoredLogits(folder, ragged(8), processing_class=Words(a=0, b=1))
    with pytest.raises(ValueError, match="stored for another tokenizer"):
        StoredLogits(folder, ragged(8), processing_class=Words(a=1, b=0))


def test_a_folder_that_is_none(folder, ragged, tmp_path):
    with pytest.raises(ValueError, match="holds no stored teacher"):
        StoredLogits(tmp_path / "nothing", ragged(8))
    shutil.copytree(folder, tmp_path / "cut")
    manifest = tmp_path / "cut" / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        StoredLogits(tmp_path / "cut", ragged(8))
    assert json.loads((folder / "manifest.json").read_text())["examples"] == 8


def test_trainer_refuses_what_does_not_go_with_stored_logits(folder, ragged, trainer, llama):
    stored = StoredLogits(folder, ragged(8))
    with pytest.raises(ValueError, match="pass one of them"):
        trainer(data=stored)
    with pytest.raises(ValueError, match="temperature=2"):
        trainer(teacher=None, data=stored, temperature=2.0)
    with pytest.raises(ValueError, match="the student knows 40"):
        trainer(llama(1, vocab_size=40), None, stored)
    with pytest.raises(ValueError, match=r"lmbda=0\.5 needs teacher_model"):
        trainer(teacher=None, data=stored, lmbda=0.5)
    with pytest.raises(ValueError, match="needs a teacher"):
        trainer(teacher=None).train()
