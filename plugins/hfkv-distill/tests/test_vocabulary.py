"""Teacher and student: one tokenizer, whatever the rows; two are refused."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import hfkv
from hfkv_distill import DistillationConfig, DistillationTrainer


def words(count, swap=False):
    names = [f"w{index}" for index in range(count)]
    if swap:
        names[3], names[4] = names[4], names[3]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({name: index for index, name in enumerate(names)}, unk_token="w0"))
    )


def make(student, teacher, rows, tmp_path, **arguments):
    settings = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "disable_tqdm": True, "max_steps": 2}
    config = DistillationConfig(**settings, **arguments.pop("config", {}))
    return DistillationTrainer(student, teacher, config, train_dataset=rows, eval_dataset=rows, **arguments)


@pytest.mark.parametrize(("ours", "theirs"), [(48, 56), (56, 48), (48, 48)])
def test_padded_vocabularies_of_one_tokenizer_are_aligned(llama, ragged, tmp_path, ours, theirs):
    student, teacher = llama(1, vocab_size=ours), llama(0, vocab_size=theirs)
    made = make(student, teacher, ragged(4), tmp_path, processing_class=words(48))
    found = made.evaluate()
    # rows of padding that are made loud are not seen
    with torch.no_grad():
        for model in (student, teacher):
            model.lm_head.weight[48:] *= 100
    assert made.evaluate()["eval_kl"] == found["eval_kl"]
    made.train()


def test_rows_that_differ_without_a_tokenizer_are_refused(llama, ragged, tmp_path):
    with pytest.raises(ValueError, match="48 outcomes and the teacher 56"):
        make(llama(1), llama(0, vocab_size=56), ragged(4), tmp_path)


def test_a_tokenizer_of_more_tokens_is_refused(llama, ragged, tmp_path):
    with pytest.raises(ValueError, match="has 50 tokens, and the smaller model knows 48"):
        make(llama(1), llama(0, vocab_size=56), ragged(4), tmp_path, processing_class=words(50))


def test_two_tokenizers_are_refused(llama, ragged, tmp_path):
    with pytest.raises(ValueError, match="different tokenizers"):
        make(
            llama(1), llama(0), ragged(4), tmp_path, processing_class=words(48),
            teacher_processing_class=words(48, swap=True),
        )  # fmt: skip


@pytest.mark.parametrize("nbits", [4, 8])
def test_teacher_in_few_bits(llama, ragged, tmp_path, nbits):
    config = {"teacher_weights": {"backend": "rtn", "nbits": nbits}}
    teacher = llama(0)
    exact = make(llama(1), llama(0), ragged(4), tmp_path).evaluate()["eval_kl"]
    made = make(llama(1), teacher, ragged(4), tmp_path, config=config)
    assert teacher.is_quantized
    bits = hfkv.describe(teacher)
    assert f"nbits={nbits}" in str(bits)
    near = made.evaluate()["eval_kl"]
    assert near != exact
    assert near == pytest.approx(exact, rel=0.02 if nbits == 8 else 0.5)
    made.train()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"alpha": 1.5}, "alpha=1.5"),
        ({"beta": -1.0}, "beta=-1.0"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"lmbda": 2.0}, "lmbda=2.0"),
        ({"logits_chunk_size": 0}, "logits_chunk_size=0"),
        ({"sampling_temperature": 0.0}, "sampling_temperature=0.0"),
        ({"cache_config": {"nbits": 2}}, "set cache_implementation"),
        ({"cache_implementation": "kivi"}, "lmbda=0"),
        ({"alpha": 1.0}, "would be ignored: alpha=1"),
    ],
)
def test_settings_that_are_refused(llama, ragged, tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        make(llama(1), llama(0), ragged(4), tmp_path, config=config)


def test_other_arguments_that_are_refused(llama, ragged, tmp_path):
    with pytest.raises(TypeError, match="DistillationConfig"):
        DistillationTrainer(llama(1), llama(0), {"alpha": 1})
    with pytest.raises(ValueError, match="compute_loss_func"):
        make(llama(1), llama(0), ragged(4), tmp_path, compute_loss_func=lambda *_: None)
    student, teacher = llama(1), llama(0)
    teacher.config = student.config
    with pytest.raises(ValueError, match="one config object"):
        make(student, teacher, ragged(4), tmp_path)
