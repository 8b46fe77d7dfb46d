"""Drafting heads: losses against the plain formula, simulation against decoding, states against the model's."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfkv import registry
from hfkv.heads import EagleHead, MedusaHeads, load_heads, save_heads
from hfkv.heads.eagle import shift
from hfkv.specs import AssistantSpec
from hfkv_distill.heads import HeadsOptions, OnlineStates, StoredStates, accepted_per_verification, store_states
from hfkv_distill.heads.acceptance import EAGLE_DRAFT, continuations
from hfkv_distill.heads.answers import answers
from hfkv_distill.heads.losses import DECAY, PASSES, HeadsLoss
from hfkv_distill.heads.training import frequent_tokens, train_heads

VOCABULARY = 48


def rows(count=6, length=20, seed=0):
    return torch.randint(2, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))


def disturbed(heads):
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return heads


def divergence(model, said, right, kept=slice(None)):
    """The plain formula, of hidden states, mean over tokens; over some of the vocabulary."""
    head = model.get_output_embeddings()
    expected, actual = (head(states)[..., kept].log_softmax(-1) for states in (right.detach(), said))
    expected = expected.detach()
    return (expected.exp() * (expected - actual)).sum(-1).mean()


@pytest.mark.parametrize("own", [False, True])
def test_the_loss_of_medusa_is_the_plain_one(llama, own):
    """Whatever the chunk, with the gradients of autograd; the model gets none."""
    model = llama()
    heads = disturbed(MedusaHeads.for_model(model, num_heads=3, own_lm_head=own))
    ids, states = OnlineStates(model, rows())(torch.arange(4))
    total = 0
    for index in range(3):
        later = index + 1
        logits = heads.head(index, states[:, : -later - 1], model.get_output_embeddings()).log_softmax(-1)
        right = model.get_output_embeddings()(states[:, later:-1]).log_softmax(-1).detach()
        total += DECAY**index * (right.exp() * (right - logits)).sum(-1).mean()
    expected = total / sum(DECAY**index for index in range(3))
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in heads.named_parameters()}
    model.zero_grad()
    for chunk_size in (7, 1000):
        heads.zero_grad()
        loss = HeadsLoss(model, heads, chunk_size)(ids, states)
        loss.backward()
        assert torch.isclose(loss, expected, rtol=1e-5)
        for name, parameter in heads.named_parameters():
            assert torch.allclose(parameter.grad, gradients[name], rtol=1e-3, atol=1e-6), name
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("kept", [None, [3, 8, 21, 40]])
def test_the_loss_of_eagle_is_the_plain_one(llama, kept):
    model = llama()
    head = disturbed(EagleHead.for_model(model, draft_vocab_size=kept and len(kept)))
    if kept:
        head.draft_vocabulary.copy_(torch.tensor(kept))
    ids, states = OnlineStates(model, rows())(torch.arange(3))
    embeddings = model.get_input_embeddings()(ids).detach()
    first = head(embeddings, shift(states[:, :-1]), use_cache=False)
    second = head(embeddings, shift(first[:, :-1]), use_cache=False)
    passes = (first, second)
    assert len(passes) == PASSES
    expected = 0
    for predicted in passes:
        expected += torch.nn.functional.smooth_l1_loss(predicted, states)
        expected += divergence(model, predicted[:, :-1], states[:, :-1], kept or slice(None))
    expected = expected / PASSES
    loss = HeadsLoss(model, head, chunk_size=11)(ids, states)
    assert torch.isclose(loss, expected, rtol=1e-5)
    wanted = torch.autograd.grad(expected, list(head.parameters()))
    found = torch.autograd.grad(loss, list(head.parameters()))
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-6)


def by_decoding(model, heads, prompt, new_tokens):
    """New tokens per forward of a decoding loop that knows nothing of continuations: drafts, verifies, goes on."""
    head, base, ids = model.get_output_embeddings(), model.base_model, prompt[None]
    states = base(ids).last_hidden_state
    ids = torch.cat([ids, head(states[:, -1:]).argmax(-1)], dim=1)
    tokens = forwards = 0
    while tokens < new_tokens:
        left = new_tokens - tokens - 1
        draft = []
        if isinstance(heads, MedusaHeads):
            draft = [heads.head(k, states[0, -1], head).argmax() for k in range(heads.config.num_heads)]
        else:
            read, seen = states, ids
            for _ in range(EAGLE_DRAFT):
                predicted = heads(model.get_input_embeddings()(seen), shift(read))
                draft.append(head(predicted[0, -1]).argmax())
                read, seen = torch.cat([read, predicted[:, -1:]], 1), torch.cat([seen, draft[-1].view(1, 1)], 1)
        draft = torch.stack(draft)[: max(left, 0)]
        whole = torch.cat([ids, draft[None]], dim=1)
        said = head(base(whole).last_hidden_state)[0].argmax(-1)
        right = 0
        while right < len(draft) and said[ids.shape[1] - 1 + right] == draft[right]:
            right += 1
        ids = torch.cat([ids, draft[None, :right], said[None, None, ids.shape[1] - 1 + right]], dim=1)
        states = base(ids[:, :-1]).last_hidden_state
        tokens, forwards = tokens + right + 1, forwards + 1
    return tokens, forwards, ids


@pytest.mark.parametrize("kind", [MedusaHeads, EagleHead])
@torch.no_grad()
def test_simulated_acceptance_is_that_of_decoding(llama, kind):
    model = llama(initializer_range=0.05, eos_token_id=None).eval()
    known = continuations(model, rows(3, 6, seed=4), 24)
    with torch.enable_grad():
        options = HeadsOptions(kind=kind.kind, steps=60, learning_rate=1e-2)
        heads = train_heads(model, OnlineStates(model, known.ids), known, options)
    tokens = forwards = 0
    for row in range(3):
        # the first new token comes with the prompt
        found = by_decoding(model, heads, known.ids[row, :6], 23)
        assert torch.equal(found[2][0, : known.ids.shape[1]], known.ids[row])
        tokens, forwards = tokens + found[0], forwards + found[1]
    simulated = accepted_per_verification(heads, model, known)
    assert simulated == pytest.approx(tokens / forwards)
    assert simulated > 1.2


def test_training_learns_and_leaves_the_model_alone(llama, tmp_path):
    model = llama(initializer_range=0.05)
    before = copy.deepcopy(model.state_dict())
    states = OnlineStates(model, rows(16, 24))
    known = continuations(model, rows(2, 6), 16)
    seen = []
    options = HeadsOptions(kind="medusa", steps=30, learning_rate=1e-2, seconds_per_log=0)
    heads = train_heads(model, states, known, options, seen.append, num_heads=2)
    assert [progress.step for progress in seen] == list(range(31))
    assert sum(progress.loss for progress in seen[-5:]) < sum(progress.loss for progress in seen[1:6])
    assert seen[-1].share == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    save_heads(heads, tmp_path / "heads")
    loaded = load_heads(tmp_path / "heads", model, "medusa")
    assert accepted_per_verification(loaded, model, known) == seen[-1].accepted
    again = train_heads(model, states, known, options, num_heads=2)
    assert all(torch.equal(a, b) for a, b in zip(heads.parameters(), again.parameters(), strict=True))


def test_states_are_computed_once_where_there_is_room(llama):
    model, data = llama(), rows(5, 8)
    forwards = []
    model.base_model.register_forward_pre_hook(lambda module, args: forwards.append(len(args[0])))
    row = 8 * model.config.hidden_size * 4
    states = OnlineStates(model, data, remembered_bytes=3 * row)
    order = torch.tensor([4, 0, 2, 1, 3])
    first, again = states(order), states(order)
    # three rows are remembered, two are computed again
    assert forwards == [5, 2]
    expected = model.base_model(data[order]).last_hidden_state
    for ids, found in (first, again):
        assert torch.equal(ids, data[order])
        torch.testing.assert_close(found, expected)


def test_frequent_tokens():
    text = torch.tensor([[9, 9, 4, 7], [4, 9, 30, 7]])
    assert frequent_tokens(text, 3, 48).tolist() == [4, 7, 9]
    # the lower ids where none of them was seen
    assert frequent_tokens(text, 6, 48).tolist() == [0, 1, 4, 7, 9, 30]


def test_heads_draft_the_text_s_tokens(llama):
    model = llama(initializer_range=0.05)
    data = rows(6, 24).clamp(max=20)
    known = continuations(model, data[:2, :6], 8)
    options = HeadsOptions(kind="eagle", steps=2)
    heads = train_heads(model, OnlineStates(model, data), known, options, draft_vocab_size=12)
    assert heads.draft_vocabulary.tolist() == frequent_tokens(data, 12, VOCABULARY).tolist()


def test_stored_states_are_the_computed_ones_and_give_the_same_heads(llama, tmp_path):
    model, data = llama(), rows(7, 12)
    told = []
    stored = store_states(model, data, tmp_path, rows_per_shard=3, progress=lambda *done: told.append(done))
    assert told == [(1, 3), (2, 3), (3, 3)]
    online, indices = OnlineStates(model, data), torch.tensor([6, 0, 3])
    for ours, theirs in zip(stored(indices), online(indices), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    size = sum(path.stat().st_size for path in tmp_path.glob("shard-*"))
    assert 0 <= size - 7 * 12 * 32 * 4 < 3 * 256
    # what is there stays, what is missing is made again
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*")}
    (tmp_path / "shard-00001.safetensors").unlink()
    again = store_states(model, data, tmp_path, rows_per_shard=3)
    changed = [path.name for path, time in times.items() if path.stat().st_mtime_ns != time]
    assert changed == ["shard-00001.safetensors"]
    assert torch.equal(again(indices)[1], stored(indices)[1])


def test_stored_states_of_something_else_or_damaged_are_refused(llama, tmp_path):
    model, data = llama(), rows(4, 12)
    store_states(model, data, tmp_path)
    with pytest.raises(ValueError, match="another text"):
        StoredStates(tmp_path, rows(4, 12, seed=5))
    with pytest.raises(ValueError, match="another model"):
        store_states(llama(1), data, tmp_path)
    shard = tmp_path / "shard-00000.safetensors"
    tensors = load_file(shard)
    tensors["hidden_states"][0, 0, 0] += 1
    save_file(tensors, shard)
    with pytest.raises(ValueError, match="damaged"):
        StoredStates(tmp_path, data)
    with pytest.raises(ValueError, match="no stored hidden states"):
        StoredStates(tmp_path / "nowhere", data)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "hydra", "steps": 1}, "medusa, eagle"),
        ({}, "pass one of them"),
        ({"minutes": 1, "steps": 1}, "pass one of them"),
        ({"minutes": 0}, "more than 0"),
        ({"steps": 1, "batch_size": 0}, "more than 0"),
    ],
)
def test_options_that_cannot_be_say_why(options, says):
    with pytest.raises(ValueError, match=says):
        HeadsOptions(**options)


def test_answers_are_chats_that_end(model_of_bytes):
    model = AutoModelForCausalLM.from_pretrained(model_of_bytes)
    tokenizer = AutoTokenizer.from_pretrained(model_of_bytes)
    prompts = ["One", "A longer prompt", "Three"]
    state = torch.get_rng_state()
    found = answers(model, tokenizer, prompts, 12, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert found == answers(model, tokenizer, prompts, 12, seed=3) != answers(model, tokenizer, prompts, 12, seed=4)
    for prompt, row in zip(prompts, found, strict=True):
        asked = tokenizer(prompt).input_ids
        assert row[: len(asked)] == asked
        assert len(row) <= len(asked) + 12
    # what one of them says ends it, wherever it says it
    end = found[1][-4]
    model.generation_config.eos_token_id = [end]
    for prompt, row in zip(prompts, answers(model, tokenizer, prompts, 12, seed=3), strict=True):
        said = row[len(tokenizer(prompt).input_ids) :]
        assert end not in said[:-1]
    tokenizer.chat_template = "{% for turn in messages %}<{{ turn.content }}>{% endfor %}"
    (row,) = answers(model, tokenizer, ["One"], 4)
    assert row[:5] == tokenizer("<One>", add_special_tokens=False).input_ids


def test_the_command_learns_from_answers(model_of_bytes, tmp_path):
    from typer.testing import CliRunner

    from hfkv.cli.app import app

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"What is {number} times {number}?\n\n" for number in range(80)), encoding="utf-8")
    options = ["--kind", "eagle", "--prompts", str(prompts), "--steps", "1", "--tokens", "32", "--json"]
    options += ["--answer-tokens", "48"]
    done = CliRunner().invoke(app, ["distill-heads", str(model_of_bytes), str(tmp_path / "heads"), *options])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    # the last tenth is held out
    asked = sum(len(f"What is {number} times {number}?") for number in range(72))
    assert asked // 32 <= told["rows"][0] <= (asked + 72 * 49) // 32
    assert all(each["identical"] == each["prompts"] == 8 for each in told["judged"])


def test_the_command_says_which_options_do_not_go_together(model_of_bytes, tmp_path):
    from typer.testing import CliRunner

    from hfkv.cli.app import app

    text = tmp_path / "text.txt"
    text.write_text("One\n", encoding="utf-8")
    for options, says in (
        (["--answer-tokens", "3"], "--prompts"),
        (["--prompts", str(text), "--text", str(text)], "--text"),
    ):
        refused = CliRunner().invoke(app, ["distill-heads", str(model_of_bytes), str(tmp_path / "heads"), *options])
        assert refused.exit_code == 2
        assert says in refused.output


def test_the_command_trains_saves_and_judges(model_of_bytes, tmp_path):
    from typer.testing import CliRunner

    from hfkv.cli.app import app

    out = tmp_path / "heads"
    options = ["--steps", "2", "--num-heads", "2", "--tokens", "32", "--states", str(tmp_path / "states"), "--json"]
    done = CliRunner().invoke(app, ["distill-heads", str(model_of_bytes), str(out), *options])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [point["step"] for point in told["simulated"]] == [0, 2]
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))["config"]
    assert config["num_heads"] == 2
    assert config["draft_vocab_size"] == told["draft_vocab_size"] == -(-config["vocab_size"] // 4)
    known = registry.manager().specs(AssistantSpec)
    expected = [("medusa", None), ("medusa", [4, 3]), ("lookup", None)]
    found = [(each["assistant"], each["branches"]) for each in told["judged"]]
    assert found == [each for each in expected if each[0] in known]
    assert all(each["identical"] == each["prompts"] == 8 for each in told["judged"])
    refused = CliRunner().invoke(app, ["distill-heads", str(model_of_bytes), str(out)])
    assert refused.exit_code == 2
