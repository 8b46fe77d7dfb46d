"""Matching of layers: by hand, and what is learned and saved with it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from hfkv_distill import Objective
from hfkv_distill.matching import evenly


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def states(model, kind, layer, ids):
    """States of a layer, from what transformers itself gives."""
    found = {}
    inner = model.model.layers[layer]
    modules = {
        "hidden": [inner],
        "attention": [inner.self_attn],
        "kv": [inner.self_attn.k_proj, inner.self_attn.v_proj],
    }
    handles = [
        module.register_forward_hook(
            lambda module, args, out, place=place: found.update({place: out[0] if isinstance(out, tuple) else out})
        )
        for place, module in enumerate(modules[kind])
    ]
    model(input_ids=ids)
    for handle in handles:
        handle.remove()
    return list(found.values())


@pytest.mark.parametrize("kind", ["hidden", "attention", "kv"])
def test_distance_is_that_of_the_formula(trainer, llama, ragged, kind):
    rows = ragged(4)
    teacher = llama(0, num_hidden_layers=4)
    made = trainer(llama(1), teacher, rows, evaluated=rows, layer_map={0: 1, 1: 3}, **{f"{kind}_weight": 0.7})
    total = count = 0
    for row in rows:
        learned = row["labels"][1:] != -100
        ids = row["input_ids"][None]
        count += int(learned.sum())
        with torch.no_grad():
            for ours, theirs in ((0, 1), (1, 3)):
                pairs = list(zip(states(made.model, kind, ours, ids), states(teacher, kind, theirs, ids), strict=True))
                for one, other in pairs:
                    total += (one - other)[0, :-1][learned].square().mean(-1).sum() / (2 * len(pairs))
    found = made.evaluate()
    assert found["eval_loss"] - found["eval_kl"] == pytest.approx(0.7 * float(total) / count, rel=1e-4)


def test_layers_are_spread_evenly():
    assert evenly(2, 4) == {0: 1, 1: 3}
    assert evenly(3, 3) == {0: 0, 1: 1, 2: 2}
    assert evenly(4, 2) == {0: 0, 1: 0, 2: 0, 3: 1}


def test_widths_that_differ_are_projected_learned_and_resumed(trainer, llama, tmp_path):
    settings = {"hidden_weight": 1.0, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    made = trainer(llama(1), llama(0, hidden_size=48), output_dir=str(tmp_path / "whole"), **settings)
    first = made._matching.projections["hidden_0"].weight.detach().clone()
    made.train()
    projection = made._matching.projections["hidden_0"].weight.detach()
    assert projection.shape == (48, 32)
    assert not torch.equal(projection, first)
    # on the student only while it is trained
    assert not any("distillation" in name for name in made.model.state_dict())
    kept = load_file(tmp_path / "whole" / "checkpoint-4" / "model.safetensors")
    assert torch.equal(kept["distillation_projections.projections.hidden_0.weight"], projection)
    again = trainer(llama(1), llama(0, hidden_size=48), output_dir=str(tmp_path / "whole"), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert losses(again) == pytest.approx(losses(made), abs=1e-6)
    assert torch.allclose(again._matching.projections["hidden_0"].weight, projection, atol=1e-6)


def test_what_cannot_be_matched(trainer, llama):
    with pytest.raises(ValueError, match="layer 7 is not there"):
        trainer(hidden_weight=1.0, layer_map={0: 7})
    with pytest.raises(ValueError, match="hidden_weight=-1"):
        trainer(hidden_weight=-1.0)
    with pytest.raises(ValueError, match="layer_map="):
        trainer(layer_map={0: 0})
    with pytest.raises(ValueError, match=r"kv_weight=1\.0 needs teacher_model"):
        trainer(teacher=None, kv_weight=1.0, alpha=1.0)


def test_labels_alone_may_be_matched(trainer):
    made = trainer(alpha=1.0, kv_weight=1.0)
    assert Objective(alpha=1.0).needs_teacher is False
    made.train()
    assert losses(made)[-1] > 0
