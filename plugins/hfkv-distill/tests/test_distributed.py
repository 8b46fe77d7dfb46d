"""Two processes and the gradient of one; adapters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from test_distributed import steps
torch.set_num_threads(1)
steps(sys.argv[2], 2)
"""


def steps(folder, batch):
    """Two steps of eight rows each, and an evaluation of five; the first process writes what came of it."""
    from conftest import make_llama, make_rows

    from hfkv_distill import DistillationConfig, DistillationTrainer

    config = DistillationConfig(
        output_dir=folder, per_device_train_batch_size=batch, per_device_eval_batch_size=2, max_steps=2,
        gradient_accumulation_steps=2, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1, alpha=0.3,
        hidden_weight=0.5,
    )  # fmt: skip
    rows = make_rows(8)
    trainer = DistillationTrainer(make_llama(1), make_llama(0), config, train_dataset=rows, eval_dataset=rows[3:])
    trainer.train()
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        logged = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
        kept = {"processes": trainer.accelerator.num_processes, "logged": logged, "kl": found["eval_kl"]}
        torch.save(kept | {"weights": trainer.model.state_dict()}, f"{folder}/result.pt")


def test_two_processes_give_the_weights_of_one(tmp_path, monkeypatch):
    here = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(here)
    steps(str(tmp_path), 4)
    one = torch.load(tmp_path / "result.pt")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # what `accelerate launch` starts too
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(script), here, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    two = torch.load(tmp_path / "result.pt")
    assert (one["processes"], two["processes"]) == (1, 2)
    for name, value in one["weights"].items():
        assert (value - two["weights"][name]).abs().max() < 1e-6, name
    # means are those of all processes, and rows that fill up the last batch do not count
    assert two["logged"] == pytest.approx(one["logged"], rel=1e-5)
    assert two["kl"] == pytest.approx(one["kl"], rel=1e-5)


def test_adapters_alone_are_trained_and_saved(trainer, llama, ragged, tmp_path):
    peft = pytest.importorskip("peft", reason="hfkv-distill[peft] is not installed")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    student = peft.get_peft_model(llama(1), settings)
    base = student.base_model.model.model.layers[0].mlp.up_proj.weight.detach().clone()
    made = trainer(student, max_steps=15, evaluated=ragged(), train_cache="kivi", lmbda=0.3, max_new_tokens=4)
    before = made.evaluate()["eval_kl"]
    made.train()
    assert made.evaluate()["eval_kl"] < 0.9 * before
    assert torch.equal(student.base_model.model.model.layers[0].mlp.up_proj.weight, base)
    made.save_model(str(tmp_path / "adapter"))
    loaded = peft.PeftModel.from_pretrained(llama(1), tmp_path / "adapter").eval()
    ids = ragged()[0]["input_ids"][None]
    assert torch.allclose(loaded(input_ids=ids).logits, student.eval()(input_ids=ids).logits, atol=1e-5)
    with pytest.raises(NotImplementedError, match="different width"):
        trainer(student, llama(0, hidden_size=48), hidden_weight=1.0)
