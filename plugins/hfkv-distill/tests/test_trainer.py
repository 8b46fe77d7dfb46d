"""The trainer: what the weights become, whatever the batches, the accumulation and the padding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.data import Dataset
from transformers import TrainerCallback

from hfkv_distill import DistillationCollator, token_losses
from hfkv_distill.losses import Objective
from hfkv_distill.teacher import in_bfloat16


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def plain_step(student, teacher, rows, objective, rate):
    """One step of plain gradient descent on the mean loss of every target, row by row."""
    soft, hard = [], []
    for row in rows:
        ids, labels = row["input_ids"][None], row["labels"][1:]
        learned = labels != -100
        ours = student(input_ids=ids).logits[0, :-1][learned]
        with torch.no_grad():
            theirs = teacher(input_ids=ids).logits[0, :-1][learned]
        parts = token_losses(ours, labels[learned], theirs, objective)
        soft.append(parts[0])
        hard.append(parts[1])
    loss = objective.mix(torch.cat(soft), torch.cat(hard)).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter -= rate * parameter.grad
    return float(loss.detach())


@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (2, 4), (1, 8)])
@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_a_step_is_that_of_the_formula_for_any_accumulation(trainer, llama, ragged, batch, accumulation, alpha):
    rows = ragged(8)
    student = llama(1)
    expected = plain_step(student, llama(0), rows, Objective(alpha=alpha, beta=0.5, temperature=2.0), 0.1)
    made = trainer(
        data=rows, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=1,
        alpha=alpha, beta=0.5, temperature=2.0, optim="sgd", learning_rate=0.1, logits_chunk_size=5,
    )  # fmt: skip
    made.train()
    reference = torch.cat([parameter.detach().flatten() for parameter in student.parameters()])
    assert losses(made)[0] == pytest.approx(expected, rel=1e-5)
    assert (weights(made) - reference).abs().max() < 1e-6


def test_accumulation_of_several_steps_gives_the_same_weights(trainer):
    results = []
    for batch, accumulation in ((8, 1), (2, 4), (1, 8)):
        made = trainer(
            per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=3, optim="sgd",
            learning_rate=0.1,
        )  # fmt: skip
        made.train()
        results.append(weights(made))
    assert max((result - results[0]).abs().max() for result in results) < 1e-6


def test_a_batch_without_a_target_has_no_loss_and_no_nan(trainer, ragged):
    made = trainer(data=[ragged(8)[2]] * 4, max_steps=1)
    before = weights(made)
    made.train()
    assert losses(made) == [0]
    assert torch.equal(weights(made), before)


def test_the_end_of_text_is_learned_where_it_is_the_padding_too():
    end = 1
    batch = DistillationCollator(pad_token_id=end)(
        [{"input_ids": torch.tensor([5, 6, end])}, {"input_ids": torch.tensor([5, 6, 7, 8, end])}]
    )
    assert batch["labels"].tolist() == [[-100, 6, end, -100, -100], [-100, 6, 7, 8, end]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]


def test_student_learns_to_end_where_padding_is_the_end(trainer, llama):
    # a teacher of hard labels alone: every text is 5, 6, 7 and the end
    rows = [{"input_ids": torch.tensor([5, 6, 7, 1])}, {"input_ids": torch.tensor([9, 5, 6, 7, 1])}] * 4
    made = trainer(llama(1), None, rows, alpha=1.0, max_steps=30, per_device_train_batch_size=8)
    made.data_collator = DistillationCollator(pad_token_id=1)
    made.train()
    output = made.model.generate(torch.tensor([[5]]), max_new_tokens=10, do_sample=False)
    assert output[0].tolist() == [5, 6, 7, 1]


def test_sampling_temperature_does_not_touch_the_loss(trainer):
    results = []
    for sampling in (0.1, 3.0):
        made = trainer(lmbda=0.0, sampling_temperature=sampling)
        made.train()
        results.append(losses(made))
    assert results[0] == results[1]


def test_sampling_temperature_does_not_touch_the_loss_of_generated_text(trainer, llama):
    # near 0 every temperature samples the same text: the loss of it must be the same too
    results = []
    for sampling in (1e-5, 1e-3):
        made = trainer(llama(1, initializer_range=1.0), lmbda=1.0, sampling_temperature=sampling, max_new_tokens=6)
        made.train()
        results.append(losses(made))
    assert results[0] == pytest.approx(results[1])
    assert results[0][0] > 0


def test_generated_responses_are_what_is_learned(trainer, ragged):
    rows, seen = ragged(4), []
    made = trainer(data=rows, lmbda=1.0, max_new_tokens=6, prompt_length=4, max_steps=1, cache_implementation="kivi")
    compute = made.compute_loss

    def watch(model, inputs, **kwargs):
        seen.append((inputs, kwargs["num_items_in_batch"]))
        return compute(model, inputs, **kwargs)

    made.compute_loss = watch
    made.train()
    [(inputs, count)] = seen
    texts = {tuple(row["input_ids"][: int((row["labels"] == -100).sum())].tolist()) for row in rows}
    assert int(count) == int((inputs["labels"] != -100).sum())
    for ids, labels, mask in zip(inputs["input_ids"], inputs["labels"], inputs["attention_mask"], strict=True):
        length, prompt = int(mask.sum()), int((labels != -100).nonzero()[0])
        assert (
            any(text[:prompt] == tuple(ids[:prompt].tolist()) for text in texts if len(text) >= prompt) or prompt == 4
        )
        assert torch.equal(labels[prompt:length], ids[prompt:length])
        assert 1 <= length - prompt <= 6
        # what follows the end is not learned
        assert 1 not in ids[prompt : length - 1].tolist()


def test_teacher_is_evaluated_and_stays_as_it_is(trainer, llama):
    teacher = llama(0, attention_dropout=0.5).train()
    before = copy.deepcopy(teacher.state_dict())
    made = trainer(teacher=teacher)
    made.train()
    assert not teacher.training
    assert all(parameter.grad is None for parameter in teacher.parameters())
    for name, value in teacher.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_copy_of_the_teacher_has_nothing_to_learn(trainer, llama):
    made = trainer(llama(0), llama(0), optim="sgd")
    made.train()
    assert max(losses(made)) < 1e-6


def test_evaluation_is_per_target(trainer, llama, ragged):
    rows = ragged(7, seed=3)
    made = trainer(evaluated=rows, per_device_eval_batch_size=3)
    found = made.evaluate()
    soft, hard, agreed = [], [], []
    for row in rows:
        learned = row["labels"][1:] != -100
        with torch.no_grad():
            ours, theirs = (
                model(input_ids=row["input_ids"][None]).logits[0, :-1][learned] for model in (made.model, llama(0))
            )
        parts = token_losses(ours, row["labels"][1:][learned], theirs, Objective())
        soft.append(parts[0])
        hard.append(parts[1])
        agreed.append((ours.argmax(-1) == theirs.argmax(-1)).float())
    assert found["eval_kl"] == pytest.approx(float(torch.cat(soft).mean()), rel=1e-5)
    assert found["eval_loss"] == pytest.approx(found["eval_kl"])
    assert found["eval_ce"] == pytest.approx(float(torch.cat(hard).mean()), rel=1e-5)
    assert found["eval_perplexity"] == pytest.approx(float(torch.cat(hard).mean().exp()), rel=1e-5)
    assert found["eval_top1"] == pytest.approx(float(torch.cat(agreed).mean()))


def test_metrics_of_a_user_see_the_logits(trainer, llama, ragged):
    made = trainer(evaluated=ragged(4, seed=3), per_device_eval_batch_size=4)
    made.compute_metrics = lambda prediction: {"width": prediction.predictions.shape[-1]}
    assert made.evaluate()["eval_width"] == 48


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("lmbda", [0.0, 0.5])
def test_killed_in_the_middle_it_resumes_to_the_same_losses(trainer, tmp_path, lmbda):
    settings = {"max_steps": 6, "lmbda": lmbda, "max_new_tokens": 5, "save_strategy": "steps", "save_steps": 2}
    whole = trainer(output_dir=str(tmp_path / "whole"), **settings)
    whole.train()
    broken = trainer(output_dir=str(tmp_path / "broken"), callbacks=[Stop()], **settings)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resumed = trainer(output_dir=str(tmp_path / "broken"), **settings)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == pytest.approx(losses(whole), abs=1e-6)
    assert (weights(resumed) - weights(whole)).abs().max() < 1e-6


def test_gradient_checkpointing_changes_nothing(trainer):
    results = []
    for checkpointing in (False, True):
        made = trainer(
            gradient_checkpointing=checkpointing, hidden_weight=0.5, train_cache="kivi",
            train_cache_config={"group_size": 8, "residual_length": 0, "sink_length": 0, "nbits": 4},
        )  # fmt: skip
        made.train()
        results.append(weights(made))
    assert (results[0] - results[1]).abs().max() < 1e-6


class Lazy(Dataset):
    """Rows that are lists, as a data set of the Hub has them."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {key: value.tolist() for key, value in self.rows[index].items()} | {"attention_mask": [1]}


def test_lists_and_columns_that_nobody_asked_for(trainer, ragged):
    results = []
    for rows in (ragged(), Lazy(ragged())):
        made = trainer(data=rows)
        made.train()
        results.append(losses(made))
    assert results[0] == results[1]


def test_prompts_of_two_templates_compare_the_response_alone(trainer, llama, ragged):
    rows, other = ragged(4), []
    for row in rows:
        prompt = torch.tensor([7, 8, 9])
        start = int((row["labels"] != -100).nonzero()[0]) if (row["labels"] != -100).any() else len(row["labels"])
        other.append(
            row
            | {
                "teacher_input_ids": torch.cat([prompt, row["input_ids"][start:]]),
                "teacher_labels": torch.cat([torch.full((3,), -100), row["labels"][start:]]),
            }
        )
    made = trainer(data=other, evaluated=other)
    expected = []
    for row in other:
        learned, theirs = row["labels"][1:] != -100, row["teacher_labels"][1:] != -100
        with torch.no_grad():
            ours = made.model(input_ids=row["input_ids"][None]).logits[0, :-1][learned]
            said = llama(0)(input_ids=row["teacher_input_ids"][None]).logits[0, :-1][theirs]
        expected.append(token_losses(ours, row["labels"][1:][learned], said, Objective())[0])
    assert made.evaluate()["eval_kl"] == pytest.approx(float(torch.cat(expected).mean()), rel=1e-5)
    other[0]["teacher_labels"][-1] = 3
    with pytest.raises(ValueError, match="different targets"):
        made.evaluate()


def test_mixed_precision_is_near_full_precision(trainer):
    results = []
    for bf16 in (False, True):
        made = trainer(bf16=bf16, logits_chunk_size=5)
        made.train()
        results.append(losses(made))
    assert results[0] == pytest.approx(results[1], rel=0.05)
    assert results[0] != results[1]


def test_a_batch_without_labels_is_refused(trainer):
    made = trainer()
    made.data_collator = lambda rows: {"input_ids": torch.stack([row["input_ids"][:5] for row in rows])}
    with pytest.raises(ValueError, match="no labels, only input_ids"):
        made.train()


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_in_bfloat16_say_what_autocast_makes_of_them(llama, tied):
    teacher = llama(0, tie_word_embeddings=tied)
    before = {name: parameter for name, parameter in teacher.named_parameters()}
    ids = torch.arange(2, 40)[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = teacher(ids).logits
        with in_bfloat16(teacher):
            assert teacher.lm_head.weight.dtype == torch.bfloat16
            assert torch.equal(teacher(ids).logits, expected)
    assert all(parameter is before[name] for name, parameter in teacher.named_parameters())
    assert (teacher.lm_head.weight is teacher.model.embed_tokens.weight) == tied
