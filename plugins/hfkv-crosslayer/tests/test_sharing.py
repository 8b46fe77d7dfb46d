"""`hfkv_crosslayer.share`: one function in every forward, in training, after saving; and what cannot share says so."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import hfkv
import hfkv_crosslayer
from hfkv import registry
from hfkv.integration import cache_argument
from hfkv.testing.models import load, logits_error
from hfkv_crosslayer.groups import donors, neighbours
from hfkv_crosslayer.layer import kinds_of
from hfkv_crosslayer.reference import LendingCache

VOCABULARY = 64
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
# norms of keys, per head and over all; windows; experts; biases
MODELS = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8},
    "mixtral": {"num_local_experts": 2},
    "qwen2": {},
    "olmo2": {},
}
LOSSLESS = 1e-4


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(model_type):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **COMMON, **MODELS.get(model_type, {}))
    return AutoModelForCausalLM.from_config(config).eval()


def shared(model):
    groups = neighbours(kinds_of(model.config), 2)
    return hfkv_crosslayer.share(copy.deepcopy(model), groups), groups


def tokens(rows=2, length=20):
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def expected(model, ids, groups):
    return model(ids, **{cache_argument(model): LendingCache(model, donors(groups))}).logits


def close(actual, wanted):
    assert float(logits_error(actual, wanted).max()) < LOSSLESS


@pytest.mark.parametrize("model_type", MODELS)
@torch.no_grad()
def test_one_function_in_every_forward(model_type):
    """Without a cache, with each kind, token by token: the logits of a forward in which borrowers read their donors."""
    model = made(model_type)
    changed, groups = shared(model)
    ids = tokens()
    wanted = expected(model, ids, groups)
    assert float(logits_error(model(ids, use_cache=False).logits, wanted).max()) > 0.01
    close(changed(ids, use_cache=False).logits, wanted)
    packing = {"nbits": 8, "group_size": 8, "residual_length": 24}
    for cache in (None, hfkv.make_cache("kivi", changed, **packing), transformers.DynamicCache()):
        steps = []
        for position in range(ids.shape[1]):
            output = changed(ids[:, position : position + 1], use_cache=True, **{cache_argument(model): cache})
            cache = output[cache_argument(model)]
            steps.append(output.logits)
        close(torch.cat(steps, dim=1), wanted)


@pytest.mark.parametrize("arguments", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"do_sample": True}, {}])
def test_generate(arguments):
    model, _ = shared(made("llama"))
    ids = tokens(rows=1, length=8).repeat(1, 3)
    output = model.generate(
        ids, max_new_tokens=10, return_dict_in_generate=True, output_logits=True, pad_token_id=0, **arguments
    )
    steps = torch.stack(output.logits, dim=1)
    beams = output.get("beam_indices")
    steps = steps if beams is None else steps[beams, torch.arange(steps.shape[1])]
    with torch.no_grad():
        close(steps, model(output.sequences, use_cache=False).logits[:, ids.shape[1] - 1 : -1])
    stored = hfkv.memory(output)
    assert [layer.stored_bytes > 0 for layer in stored.layers] == [True, False, True, False]


def test_a_left_padded_batch_is_each_row_alone():
    model, _ = shared(made("llama"))
    ids = tokens(rows=2, length=12)
    ids[0, :5] = 0
    output = model.generate(
        ids, attention_mask=(ids != 0).long(), max_new_tokens=6, return_dict_in_generate=True, output_logits=True,
        pad_token_id=0, cache_implementation="kivi",
    )  # fmt: skip
    with torch.no_grad():
        alone = model(output.sequences[:1, 5:], use_cache=False).logits[:, 6:-1]
    close(torch.stack(output.logits, dim=1)[:1], alone)


@pytest.mark.parametrize("model_type", MODELS)
def test_gradients_are_those_of_the_shared_function(model_type):
    """Plain, checkpointed, and with two forwards before one backward."""
    model = made(model_type)
    changed, groups = shared(model)
    first, second = tokens(), tokens().flip(0, 1)
    loss = sum(expected(model, ids, groups).logsumexp(-1).square().mean() for ids in (first, second))
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    for checkpointing in (False, True):
        changed.zero_grad()
        changed.train()
        if checkpointing:
            changed.gradient_checkpointing_enable()
        ours = sum(changed(ids, use_cache=False).logits.logsumexp(-1).square().mean() for ids in (first, second))
        ours.backward()
        assert torch.isclose(ours, loss, rtol=1e-5)
        for name, parameter in changed.named_parameters():
            assert torch.allclose(
                parameter.grad, wanted[name], rtol=1e-3, atol=1e-5 * float(wanted[name].abs().max())
            ), name


def test_borrowers_have_no_projections_of_keys_and_values():
    model = made("qwen3")
    before = model.num_parameters()
    changed, groups = shared(model)
    gone = [name for name, _ in model.named_parameters() if name not in dict(changed.named_parameters())]
    modules = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
    assert gone == [f"model.layers.{index}.self_attn.{name}" for index in donors(groups) for name in modules]
    assert changed.num_parameters() == before - 2 * (2 * 32 * 32 + 16)
    called = []
    for index in donors(groups):
        changed.model.layers[index].self_attn.k_proj.register_forward_hook(lambda module, args, out: called.append(out))
    changed(tokens())
    assert [out.untyped_storage().nbytes() for out in called] == [4, 4]


def test_reentrant_checkpointing_is_refused():
    model, _ = shared(made("llama"))
    model.train().gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(NotImplementedError, match="'use_reentrant': False"):
        model(tokens(), labels=tokens())


def test_trainer_trains_saves_and_loads(tmp_path):
    """A plain Trainer, with checkpointing; the model that it saved goes on as it was."""
    pytest.importorskip("accelerate")
    model, _ = shared(made("llama"))
    data = [{"input_ids": row, "labels": row} for row in tokens(rows=4)]
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        learning_rate=1e-2, save_strategy="no", gradient_checkpointing=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=data)
    with torch.no_grad():
        before = float(model.eval()(tokens(), labels=tokens()).loss)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        after = loaded(tokens(), labels=tokens()).loss
        assert torch.equal(after, model.eval()(tokens(), labels=tokens()).loss)
    assert float(after) < before


@pytest.mark.parametrize("model_type", MODELS)
@torch.no_grad()
def test_saved_and_loaded_it_is_the_same(model_type, tmp_path):
    model, groups = shared(made(model_type))
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.config.hfkv == {"crosslayer": {"groups": groups}}
    ids = tokens()
    assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)
    again = copy.deepcopy(loaded)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert torch.equal(pickle.loads(pickle.dumps(loaded))(ids).logits, model(ids).logits)
    # a model that is made from such a config shares as well
    fresh = AutoModelForCausalLM.from_config(loaded.config)
    assert set(dict(fresh.named_parameters())) == set(dict(model.named_parameters()))


def test_without_hfkv_a_saved_model_is_refused_and_never_random(tmp_path):
    shared(made("llama"))[0].save_pretrained(tmp_path)
    source = "import sys, transformers; transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", source, str(tmp_path)],
        env={**os.environ, "HFKV_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "k_proj.weight" in done.stderr
    assert "mismatch" in done.stderr.lower()


def test_a_plugin_that_is_missing_is_named(tmp_path):
    model = made("llama")
    model.config.hfkv = {"crosslayers": {"groups": []}}
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"config\.hfkv='crosslayers' is not known.*'crosslayer'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("family", "error", "says"),
    [("t5", NotImplementedError, "has an encoder"), ("gemma4", NotImplementedError, "natively")],
)
def test_models_that_cannot_share_say_why(family, error, says):
    with pytest.raises(error, match=says):
        hfkv_crosslayer.share(copy.deepcopy(load(family, "sdpa").model), [[0, 1]])


def test_a_number_of_layers_stands_for_groups_that_the_map_chooses():
    model = made("llama")
    spec = registry.manager().find(hfkv.StructureSpec, "crosslayer", "structure")
    changed = spec.resolve_change()(copy.deepcopy(model), 2)
    assert changed.config.hfkv == {"crosslayer": {"groups": [[0, 1], [2, 3]]}}
    ids = tokens()
    similar = hfkv_crosslayer.share(copy.deepcopy(model), 2, map="similar", input_ids=ids)
    assert similar.config.hfkv["crosslayer"]["groups"] == hfkv_crosslayer.similar_groups(model, input_ids=ids, share=2)
    for groups, arguments, says in (
        (1, {}, "at least 2"),
        (2, {"map": "alike"}, "Choose from: neighbours, similar"),
        ([[0, 1]], {"map": "similar"}, "they are given"),
        (2, {"map": "similar"}, "input_ids"),
    ):
        with pytest.raises(ValueError, match=says):
            hfkv_crosslayer.share(copy.deepcopy(model), groups, **arguments)


def test_fused_projections_and_sharing_twice_are_refused():
    config = AutoConfig.for_model("phi3", **COMMON, pad_token_id=0)
    with pytest.raises(NotImplementedError, match="without k_proj and v_proj"):
        hfkv_crosslayer.share(AutoModelForCausalLM.from_config(config), [[0, 1]])
    deaf = made("stablelm")
    before = set(deaf.state_dict())
    with pytest.raises(NotImplementedError, match="pass no keyword arguments on"):
        hfkv_crosslayer.share(deaf, [[0, 1]])
    assert set(deaf.state_dict()) == before
    model, groups = shared(made("llama"))
    with pytest.raises(ValueError, match="share already"):
        hfkv_crosslayer.share(model, groups)
    with pytest.raises(ValueError, match="share keys and values already"):
        hfkv.make_cache("crosslayer", model)


@torch.no_grad()
def test_what_is_shared_is_what_the_cache_shares():
    """The cache of the whole model, and the model that was changed, compute the same."""
    model = made("llama")
    changed, groups = shared(model)
    ids = tokens()
    cache = hfkv.make_cache("crosslayer", model, groups=groups)
    close(model(ids, **{cache_argument(model): cache}).logits, changed(ids).logits)
