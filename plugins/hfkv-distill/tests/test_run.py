"""`hfkv distill` and what it is made of: the budget, the windows, the curve, the summary."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hfkv.cli.app import app
from hfkv_distill import figure, texts
from hfkv_distill.budget import FLOOR, WARMUP, Budget, rate
from hfkv_distill.distill_command import main
from hfkv_distill.run import Held, Result, RunOptions, distill
from hfkv_distill.unfinished import Unfinished

TEXT = "".join(f"The number after {n} is {n + 1}, and the one before is {n - 1}.\n" for n in range(100, 400))


@pytest.fixture(scope="module")
def tokenizer():
    tokens = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    whole = Tokenizer(models.BPE(vocab=tokens | {"<pad>": 256}, merges=[]))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<pad>")


@pytest.fixture
def pair(llama):
    """A teacher, and a copy of it that has lost a layer."""
    teacher, student = llama(0, vocab_size=257, num_hidden_layers=3), llama(0, vocab_size=257, num_hidden_layers=3)
    with torch.no_grad():
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            student.model.layers[1].get_submodule(name).weight.zero_()
    return teacher, student


def test_windows_are_the_text_and_the_last_tenth_is_held_out(tokenizer):
    data = texts.examples(tokenizer, TEXT, "numbers", 100)
    ids = tokenizer(TEXT).input_ids
    begin = len(ids) - len(ids) // 10
    assert torch.cat([row["input_ids"] for row in data.train]).tolist() == ids[: begin // 100 * 100]
    assert data.held_out[0]["input_ids"].tolist() == ids[begin : begin + 100]
    assert len(texts.examples(tokenizer, TEXT, "numbers", 100, held_out=3).held_out) == 3
    with pytest.raises(ValueError, match="too few for windows of 9,000"):
        texts.examples(tokenizer, TEXT, "numbers", 9000)


def test_time_is_counted_without_pauses_and_ends_the_run():
    budget, control = Budget(0.2, None), SimpleNamespace(should_training_stop=False)
    group = {"lr": 0.0}
    optimizer = SimpleNamespace(param_groups=[group])
    args, rates, step = SimpleNamespace(learning_rate=2.0), [], 0
    budget.on_train_begin(args, None, control)
    started = time.perf_counter()
    while not control.should_training_stop:
        step += 1
        budget.on_step_begin(args, None, control, optimizer=optimizer)
        rates.append(group["lr"])
        time.sleep(0.02)
        budget.on_step_end(args, SimpleNamespace(global_step=step), control)
        if step == 2:
            time.sleep(0.1)
            budget.on_evaluate(args, None, control)
    assert 0.2 <= budget.spent < time.perf_counter() - started - 0.09
    assert rates[0] == pytest.approx(2 * FLOOR)
    assert rates[-1] < max(rates) <= 2


def test_rate_rises_then_falls():
    assert rate(0) == FLOOR
    assert rate(WARMUP) == pytest.approx(1)
    assert rate(1) == pytest.approx(FLOOR)
    values = [rate(WARMUP + step / 100) for step in range(95)]
    assert values == sorted(values, reverse=True)


def test_a_run_heals_and_says_so(pair, tokenizer):
    teacher, student = pair
    data = texts.examples(tokenizer, TEXT, "numbers", 64, held_out=6)
    stages = []
    options = RunOptions(minutes=None, steps=40, learning_rate=5e-3, batch_size=8)
    result = distill(student, teacher, data, options, stage=stages.append, processing_class=tokenizer)
    assert result.removed > 0.5
    assert result.after.top1 > result.before.top1
    assert result.steps == 40
    assert result.tokens == 40 * 8 * 63
    assert len(result.curve) == 40
    assert result.curve[0].kl == pytest.approx(result.before.kl, rel=0.2)
    assert stages == ["measuring the student", "measuring the teacher", "training", "measuring again"]


def test_bfloat16_trains_in_it_and_measures_without(pair, tokenizer):
    teacher, student = pair
    seen = {True: set(), False: set()}
    student.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: seen[student.training].add(output.dtype)
    )
    data = texts.examples(tokenizer, TEXT, "numbers", 32, held_out=2)
    distill(student, teacher, data, RunOptions(steps=2, minutes=None, batch_size=2, bf16=True))
    assert seen == {True: {torch.bfloat16}, False: {torch.float32}}
    # and leaves forwards that anybody may use
    student(data.held_out[0]["input_ids"][None])
    assert seen[False] == {torch.float32}


def test_measured_through_a_cache_it_is_trained_for_it(pair, tokenizer):
    teacher, _ = pair
    found = {}
    for plain in (False, True):
        options = RunOptions(
            minutes=None, steps=20, learning_rate=2e-3, batch_size=8, train_plain=plain, cache="kivi",
            cache_config={"nbits": 2, "group_size": 8, "residual_length": 0, "sink_length": 0},
        )  # fmt: skip
        student = type(teacher)(teacher.config.__class__.from_dict(teacher.config.to_dict()))
        student.load_state_dict(teacher.state_dict())
        data = texts.examples(tokenizer, TEXT, "numbers", 64, held_out=6)
        found[plain] = distill(student, teacher, data, options, processing_class=tokenizer)
    assert found[True].before == found[False].before
    assert found[True].before.kl > 0.01
    assert found[False].after.kl < 0.9 * found[True].after.kl


def test_removed_is_a_share():
    before, after = Held(2.0, 0.1, 9.0), Held(0.5, 0.6, 5.0)
    assert Result(before, after, 4.0, 1, 1, 1.0, []).removed == 0.75


@pytest.mark.parametrize(
    ("options", "message"),
    [({"objective": "mse"}, "objective='mse'"), ({"objective": "ce", "alpha": 0.5}, "has no teacher"),
     ({"train_plain": True}, "train_plain")],
)  # fmt: skip
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RunOptions(**options)


def test_curve_is_a_picture_of_its_points():
    points = [(0.1 * step, 3 - 0.02 * step) for step in range(100)]
    picture = ElementTree.fromstring(figure.curve("KL & loss", "minutes", "nats", points))
    lines = [e.get("points").split() for e in picture.iter("{http://www.w3.org/2000/svg}polyline")]
    drawn = [[tuple(map(float, point.split(","))) for point in line] for line in lines]
    [exact, mean] = [line for line in drawn if len(line) == 100]
    # down on the page is down in value, and everything is inside
    assert exact[0][1] < exact[-1][1]
    assert mean[50][1] < exact[50][1]
    assert all(0 <= x <= figure.WIDTH and 0 <= y <= figure.HEIGHT for line in drawn for x, y in line)
    assert figure.ticks(0, 9.9) == [0, 2, 4, 6, 8, 10]
    assert figure.ticks(2, 2)[0] <= 2 < figure.ticks(2, 2)[-1]
    with pytest.raises(ValueError, match="nothing to draw"):
        figure.curve("", "", "", [])


def test_command_trains_saves_and_reports(pair, tokenizer, tmp_path):
    for name, model in zip(("teacher", "student"), pair, strict=True):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "text.txt").write_text(TEXT)
    command = [
        sys.executable, "-m", "hfkv.cli", "distill", "--teacher", str(tmp_path / "teacher"), "--student",
        str(tmp_path / "student"), "--out", str(tmp_path / "out"), "--text", str(tmp_path / "text.txt"),
        "--steps", "8", "--length", "64", "--learning-rate", "5e-3", "--held-out", "4", "--device", "cpu", "--no-bf16",
        "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["after"]["kl"] < found["before"]["kl"]
    assert found["steps"] == 8
    assert "tokens/s" in done.stderr
    kept = json.loads((tmp_path / "out" / "distillation.json").read_text())
    assert kept["after"] == found["after"]
    ElementTree.parse(tmp_path / "out" / "distillation.svg")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not torch.equal(trained.lm_head.weight, pair[1].lm_head.weight)
    with pytest.raises(ValueError, match="is not empty"):
        main(teacher="a", student="b", out=tmp_path / "out")


def test_a_run_that_is_killed_goes_on_to_the_same_curve(pair, tokenizer, tmp_path):
    """`kill -9` in the middle: the same command takes up weights, optimizer, order of the data, curve and measures."""
    for name, model in zip(("teacher", "student"), pair, strict=True):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "out"
    asked = [
        "distill", "--teacher", str(tmp_path / "teacher"), "--student", str(tmp_path / "student"), "--out", str(out),
        "--text", str(tmp_path / "text.txt"), "--steps", "16", "--length", "64", "--learning-rate", "5e-3",
        "--held-out", "4", "--device", "cpu", "--no-bf16", "--json",
    ]  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "hfkv.cli", *asked, "--checkpoint-minutes", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        while not list(out.glob("unfinished/checkpoint-[3-9]/progress.json")):
            assert run.poll() is None, run.stderr.read()
            time.sleep(0.005)
        run.send_signal(signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL
    # what a checkpoint looks like that was cut short
    (out / "unfinished" / "checkpoint-15").mkdir()
    begun = max(int(path.parent.name[11:]) for path in out.glob("unfinished/checkpoint-*/progress.json"))
    assert 3 <= begun < 15

    refused = CliRunner().invoke(app, [*asked, "--learning-rate", "1e-3"])
    assert refused.exit_code != 0
    assert "learning_rate was 0.005 and is 0.001" in " ".join(refused.output.split())
    resumed = CliRunner().invoke(app, asked)
    assert resumed.exit_code == 0, resumed.output
    found = json.loads(resumed.stdout)
    assert "going on with the run" in resumed.stderr
    assert "measuring the student" not in resumed.stderr
    assert not (out / "unfinished").exists()

    student, teacher = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("student", "teacher"))
    data = texts.examples(tokenizer, TEXT, "numbers", 64, held_out=4)
    whole = distill(student, teacher, data, RunOptions(minutes=None, steps=16, learning_rate=5e-3))
    assert [point["loss"] for point in found["curve"]] == pytest.approx([point.loss for point in whole.curve], rel=1e-4)
    assert found["before"]["kl"] == pytest.approx(whole.before.kl, rel=1e-4)
    assert found["after"]["kl"] == pytest.approx(whole.after.kl, rel=1e-3)
    seconds = [point["seconds"] for point in found["curve"]]
    assert seconds == sorted(seconds)


def test_time_goes_on_where_it_was(pair, tokenizer, tmp_path):
    """A run of so many minutes that is stopped has as many left as it had: what it has spent is in the checkpoint."""
    teacher, student = pair
    data = texts.examples(tokenizer, TEXT, "numbers", 64, held_out=4)
    options = RunOptions(minutes=1.0, learning_rate=5e-3)

    class StoppedError(Exception):
        pass

    def show(budget, point, speed):
        if budget.step == 3:
            # as if the clock had run on
            budget.spent = 59.9
        if budget.step == 4:
            raise StoppedError

    def run(show):
        return distill(student, teacher, data, options, show=show, unfinished=Unfinished(tmp_path / "run", 0, {}))

    with pytest.raises(StoppedError):
        run(show)
    started = time.perf_counter()
    result = run(lambda budget, point, speed: None)
    assert time.perf_counter() - started < 30
    assert result.seconds >= 60
    assert result.steps > 3
    assert [point.tokens for point in result.curve] == [4 * 63 * step for step in range(1, result.steps + 1)]
