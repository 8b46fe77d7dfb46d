"""The way from hidden states to logits: what models do with their logits is known, or the model is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hfkv_distill.head import OutputHead, replaced_forward

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
FAMILIES = {
    "cap": ("gemma2", {"head_dim": 16, "num_key_value_heads": 1, "final_logit_softcapping": 2.0}),
    "factor": ("cohere", {"num_key_value_heads": 1, "logit_scale": 0.25}),
    "divisor": ("granite", {"num_key_value_heads": 1, "logits_scaling": 3.0}),
    "tied": ("qwen3", {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "bias": ("phi", {}),
}


def make(family):
    kind, settings = FAMILIES[family]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **settings)).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_forward(family):
    model, seen = make(family), []
    head, ids = OutputHead(model), torch.randint(40, (2, 7))
    with torch.no_grad(), head.taken(lambda states, way: seen.append(way(states))):
        nothing = model(input_ids=ids).logits
    assert torch.allclose(seen[0], model(input_ids=ids).logits, atol=1e-6)
    assert nothing.numel() == 0
    assert head.forgets_logits == (family in ("tied", "bias"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_any_family(family, trainer, ragged):
    rows = [{"input_ids": row["input_ids"] % 40, "labels": row["labels"].clamp(max=39)} for row in ragged()]
    made = trainer(make(family), make("tied") if family == "tied" else make(family), rows, optim="sgd", alpha=0.5)
    made.train()
    assert all(torch.isfinite(parameter).all() for parameter in made.model.parameters())


def test_logits_that_are_changed_in_an_unknown_way_are_refused(llama):
    model = llama(0)
    plain = model.forward

    def forward(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    with replaced_forward(model, forward), pytest.raises(NotImplementedError, match="changes the logits"):
        OutputHead(model)
    # and what was called before is called again
    assert model.forward == plain
    OutputHead(model)


def test_models_without_such_a_head_are_refused(llama):
    with pytest.raises(NotImplementedError, match="not a decoder"):
        OutputHead(
            AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", d_model=16, d_kv=8, d_ff=16, num_layers=1))
        )
    with pytest.raises(NotImplementedError, match="LlamaModel"):
        OutputHead(llama(0).model)
