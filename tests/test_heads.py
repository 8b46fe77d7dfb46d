"""Drafting heads: their shapes, what untrained ones predict, and the folder they are kept in."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hfkv.heads import EagleHead, MedusaHeads, load_heads, save_heads
from hfkv.heads.eagle import shift


@pytest.fixture
def model(tiny):
    return tiny("llama").model


KINDS = [
    (MedusaHeads, {"num_heads": 3}),
    (MedusaHeads, {"num_heads": 2, "num_layers": 2, "own_lm_head": True}),
    (EagleHead, {}),
    (EagleHead, {"num_layers": 2, "intermediate_size": 40}),
    (MedusaHeads, {"draft_vocab_size": 10}),
    (EagleHead, {"draft_vocab_size": 10}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_heads_come_back_from_their_folder(model, tmp_path, kind, options):
    heads = kind.for_model(model, **options)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += torch.randn_like(parameter)
        for buffer in heads.buffers():
            buffer += 7
    save_heads(heads, tmp_path / "heads")
    again = load_heads(tmp_path / "heads", model)
    assert type(again) is kind
    assert again.config == heads.config
    assert not again.training
    state = again.state_dict()
    assert state.keys() == heads.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in heads.state_dict().items())
    # nothing of the model's is kept: at least an embedding would be
    own = sum(tensor.numel() for tensor in load_file(tmp_path / "heads" / "model.safetensors").values())
    kept = options.get("draft_vocab_size", 0)
    assert own == sum(parameter.numel() for parameter in heads.parameters()) + kept


def test_heads_take_the_dtype_of_their_model(model, tmp_path):
    save_heads(MedusaHeads.for_model(model), tmp_path)
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert {parameter.dtype for parameter in load_heads(tmp_path, half).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("own_lm_head", [False, True])
def test_untrained_medusa_heads_predict_what_the_model_does(model, own_lm_head):
    heads = MedusaHeads.for_model(model, num_heads=3, own_lm_head=own_lm_head)
    ids = torch.arange(5, 17)[None]
    hidden = model.base_model(input_ids=ids).last_hidden_state
    logits = heads(hidden, model.get_output_embeddings())
    assert logits.shape == (3, 1, 12, 96)
    for each in logits:
        torch.testing.assert_close(each, model(input_ids=ids).logits)


@pytest.mark.parametrize("packed", [False, True])
def test_a_draft_vocabulary_reads_its_rows_alone(model, packed):
    heads = MedusaHeads.for_model(model, num_heads=2, draft_vocab_size=3)
    kept = torch.tensor([5, 40, 77])
    heads.draft_vocabulary.copy_(kept)
    hidden = model.base_model(input_ids=torch.arange(5, 17)[None]).last_hidden_state
    whole = model.get_output_embeddings()(hidden)
    if packed:
        # a layer whose rows cannot be taken
        model = copy.deepcopy(model)
        model.set_output_embeddings(torch.nn.Sequential(model.get_output_embeddings()))
    output = heads.draft_output(model)
    torch.testing.assert_close(output.narrow(hidden), whole[..., kept])
    for each in heads(hidden, output):
        assert each.shape == whole.shape
        torch.testing.assert_close(each[..., kept], whole[..., kept])
        others = torch.ones(96, dtype=torch.bool).index_fill_(0, kept, False)
        assert each.softmax(-1)[..., others].count_nonzero() == 0
        # where all that is drafted is forbidden, something else is drafted
        assert torch.isfinite(each.index_fill(-1, kept, -torch.inf).softmax(-1)).all()


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (MedusaHeads, {"draft_vocab_size": 0}, "from 1 to vocab_size=96"),
        (EagleHead, {"draft_vocab_size": 97}, "from 1 to vocab_size=96"),
        (MedusaHeads, {"draft_vocab_size": 9, "own_lm_head": True}, "own_lm_head=True"),
    ],
)
def test_a_draft_vocabulary_that_cannot_be(model, kind, options, says):
    with pytest.raises(ValueError, match=says):
        kind.for_model(model, **options)


def test_head_of_one_layer_can_be_the_model_itself(tiny):
    # the hidden state of the token before is not needed: the layer sees all tokens, at the model's own places
    config = copy.deepcopy(tiny("llama").model.config)
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    head = exact_eagle(model)
    ids = torch.arange(5, 17)[None]
    hidden = model.base_model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(head(model.get_input_embeddings()(ids), shift(hidden[:, :-1])), hidden)


def exact_eagle(model):
    head = EagleHead.for_model(model)
    size = model.config.hidden_size
    with torch.no_grad():
        head.join.weight.copy_(torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1))
        head.join.bias.zero_()
    state = {name: tensor for name, tensor in model.base_model.state_dict().items() if "embed_tokens" not in name}
    head.decoder.load_state_dict(state)
    return head.eval()


def test_shift_leaves_padding_out():
    hidden = torch.arange(1.0, 9.0).reshape(2, 4, 1)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    assert shift(hidden)[..., 0].tolist() == [[0, 1, 2, 3, 4], [0, 5, 6, 7, 8]]
    assert shift(hidden, mask)[..., 0].tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 7, 8]]


def test_wrong_folders_are_refused(model, tmp_path):
    with pytest.raises(ValueError, match=r"no drafting heads: there is no config.json"):
        load_heads(tmp_path, model)
    save_heads(MedusaHeads.for_model(model), tmp_path)
    with pytest.raises(ValueError, match=r"holds 'medusa' heads, not 'eagle'"):
        load_heads(tmp_path, model, kind="eagle")
    other = copy.deepcopy(model)
    other.resize_token_embeddings(100)
    with pytest.raises(ValueError, match=r"vocab_size=96, and LlamaForCausalLM has 100"):
        load_heads(tmp_path, other)
    weights = load_file(tmp_path / "model.safetensors")
    weights["extra"] = weights.pop("blocks.0.0.linear.bias")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing weights \['blocks.0.0.linear.bias'\], unknown weights \['extra'\]"):
        load_heads(tmp_path, model)
    record = json.loads((tmp_path / "config.json").read_text())
    for change in ({"hfkv_heads": 2}, {"kind": "hydra"}):
        (tmp_path / "config.json").write_text(json.dumps(record | change))
        with pytest.raises(ValueError, match=r"this hfkv reads hfkv_heads=1 of the kinds 'medusa', 'eagle'"):
            load_heads(tmp_path, model)


def read_rows(heads, model):
    """The rows that `draft_output` reads."""
    return heads.draft_output(model)._rows[0]


def test_rows_of_a_draft_vocabulary_are_copied_once(model):
    model = copy.deepcopy(model)
    heads = MedusaHeads.for_model(model, draft_vocab_size=3)
    rows = read_rows(heads, model)
    assert read_rows(heads, model) is rows
    weight = model.get_output_embeddings().weight
    for change in (
        # in place, as an optimizer does; as `model.to` does; and as loading does
        lambda: weight.mul_(2),
        lambda: setattr(weight, "data", weight.data + 1),
        lambda: heads.draft_vocabulary.add_(5),
    ):
        with torch.no_grad():
            change()
        assert torch.equal(read_rows(heads, model), weight[heads.draft_vocabulary])
    # another model with the same numbers is another
    assert read_rows(heads, copy.deepcopy(model)) is not read_rows(heads, model)


def test_rows_of_a_draft_vocabulary_are_freed_with_the_heads_and_keep_no_model(model):
    model = copy.deepcopy(model)
    heads = MedusaHeads.for_model(model, draft_vocab_size=3)
    copied = copy.deepcopy(heads)
    rows, weight, other = (weakref.ref(each) for each in (read_rows(heads, model), model.lm_head.weight, model))
    del model
    gc.collect()
    assert weight() is None
    assert other() is None
    assert rows() is not None
    del heads
    gc.collect()
    assert rows() is None
    pickle.loads(pickle.dumps(copied))


def test_an_output_embedding_that_is_fetched_for_each_forward_is_read_whole(model):
    accelerate = pytest.importorskip("accelerate", reason="accelerate, which fetches the embedding, is not installed")
    heads = MedusaHeads.for_model(model, draft_vocab_size=3)
    states = torch.randn(2, model.config.hidden_size)
    expected = heads.draft_output(model)(states)
    away = accelerate.cpu_offload(copy.deepcopy(model), execution_device="cpu")
    assert away.lm_head.weight.is_meta
    assert torch.equal(heads.draft_output(away)(states), expected)
