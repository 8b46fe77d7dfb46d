"""Quantized weights: the config, which layers it names, and what transformers is told."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GPT2Config, GPT2LMHeadModel, T5Config
from transformers.quantizers import auto

import hfkv
from hfkv.testing.weights import IDS, logits, small_model
from hfkv.weights import QuantizedLinear, WeightOptions


class HalfLinear(QuantizedLinear):
    """A backend of this file: the weight in float16, in one row of bytes."""

    backend = "half"
    Options = WeightOptions

    def layout(self):
        return {"bytes": ((2 * self.in_features * self.out_features,), torch.uint8)}

    def encode(self, weight):
        return {"bytes": weight.half().flatten().contiguous().view(torch.uint8)}

    def decode(self, dtype):
        return self.bytes.view(torch.float16).view(self.out_features, self.in_features).to(dtype)


class Half:
    @hfkv.hookimpl
    def hfkv_weight_quantizers(self):
        yield hfkv.WeightQuantizerSpec(name="half", summary="float16", load=f"{__name__}:HalfLinear")
        yield hfkv.WeightQuantizerSpec(name="absent", summary="-", load="no:where", requires=("surely-not-there>=1",))


@pytest.fixture(autouse=True)
def half(register):
    register(Half(), "halves")


def layers(model):
    return [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]


# the config


def test_unknown_backend_lists_the_choices_and_the_closest():
    with pytest.raises(ValueError, match=r"backend='hlaf' is not known\. Choose from: .*half.* Did you mean 'half'"):
        hfkv.WeightConfig("hlaf")


def test_unknown_option_lists_the_choices_and_the_closest():
    with pytest.raises(ValueError, match=r"option 'nbit' is not known to 'rtn'\. Valid options: nbits.*mean 'nbits'"):
        hfkv.WeightConfig("rtn", nbit=4)
    with pytest.raises(ValueError, match=r"layers\['0'\] option 'groupsize' is not known to 'rtn'.*mean 'group_size'"):
        hfkv.WeightConfig("rtn", layers={"0": {"groupsize": 4}})


def test_backend_that_is_not_installed_says_how_to_install_it():
    with pytest.raises(ImportError, match=r"'absent' needs surely-not-there>=1.*pip install 'surely-not-there>=1'"):
        hfkv.WeightConfig("absent")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"skip": "lm_head"}, r"skip='lm_head' must be a list of module names, such as \['lm_head'\]"),
        ({"layers": ["0"]}, r"layers=\['0'\] must be a dict"),
        ({"layers": {"0": 8}}, r"layers\['0'\]=8 must be a dict of options or 'skip'"),
        ({"quant_method": "gptq"}, r"quant_method='gptq' is not 'hfkv'"),
        ({"format": 2}, r"saved in format 2, this hfkv reads 1: upgrade hfkv"),
    ],
)
def test_what_cannot_be_meant_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        hfkv.WeightConfig("half", **given)


def test_options_are_saved_with_their_defaults_and_the_users_dicts_stay():
    given = {"0": {"nbits": 8}, "-1": "skip"}
    before = copy.deepcopy(given)
    config = hfkv.WeightConfig("rtn", layers=given)
    assert config.to_dict()["nbits"] == 4
    assert hfkv.WeightConfig(**config.to_dict()) == config
    config.layers["0"]["nbits"] = 3
    assert given == before
    assert config != hfkv.WeightConfig("rtn", layers=given)


# which layers


def test_head_and_what_is_tied_stay_by_default_and_are_saved_by_name():
    for tied in (True, False):
        model = hfkv.quantize_weights(small_model(tied=tied), hfkv.WeightConfig("half"))
        assert len(layers(model)) == 14
        assert model.config.quantization_config.skip == ["lm_head"]
        assert model.config.tie_word_embeddings is tied


def test_tied_head_that_is_quantized_is_split_off_and_the_config_says_so():
    model = hfkv.quantize_weights(small_model(), hfkv.WeightConfig("half", skip=[]))
    assert len(layers(model)) == 15
    assert model.config.tie_word_embeddings is False
    model.tie_weights()
    assert isinstance(model.lm_head, QuantizedLinear)


def test_layers_and_modules_take_options_of_their_own():
    overrides = {"0": "skip", "down_proj": {"nbits": 8}, "1": {"backend": "half"}, "layers.1.mlp": {"nbits": 2}}
    model = hfkv.quantize_weights(small_model(), hfkv.WeightConfig("rtn", nbits=3, layers=overrides))
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    # later entries win
    assert model.model.layers[0].mlp.down_proj.options.nbits == 8
    assert model.model.layers[1].self_attn.q_proj.backend == "half"
    assert model.model.layers[1].mlp.down_proj.options.nbits == 2
    skipped = hfkv.quantize_weights(
        small_model(), hfkv.WeightConfig("half", skip=["self_attn", "layers.1.mlp.up_proj"])
    )
    assert layers(skipped) == [
        *(f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")),
        *(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "down")),
        # a list is all that is left out
        "lm_head",
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"skip": ["lmhead"]}, r"skip names 'lmhead', .*Did you mean 'lm_head'"),
        ({"layers": {"down": {}}}, r"layers names 'down', and no linear layer of this model is called so"),
        ({"layers": {"2": {}}}, r"layers\['2'\] is outside this model's layers 0 to 1"),
    ],
)
def test_entry_that_names_nothing_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        hfkv.quantize_weights(small_model(), hfkv.WeightConfig("half", **given))


def test_model_without_linear_layers_is_refused():
    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)
    with pytest.raises(NotImplementedError, match=r"GPT2LMHeadModel has 1 linear layers .*leaves out all"):
        hfkv.quantize_weights(GPT2LMHeadModel(config), hfkv.WeightConfig("half"))


def test_quantizing_twice_is_refused():
    model = hfkv.quantize_weights(small_model(), hfkv.WeightConfig("half"))
    with pytest.raises(ValueError, match=r"quantized already, by 'hfkv'. Fix: model.dequantize\(\)"):
        hfkv.quantize_weights(model, hfkv.WeightConfig("half"))
    hfkv.quantize_weights(model.dequantize(), hfkv.WeightConfig("rtn"))


# the layer


def test_weight_is_missing_for_model_code_that_reads_its_dtype(tmp_path):
    config = T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, feed_forward_proj="relu", pad_token_id=0
    )
    torch.manual_seed(0)
    plain = AutoModelForSeq2SeqLM.from_config(config).eval()
    plain.save_pretrained(tmp_path)
    ids = torch.arange(1, 9)[None]
    before = plain(input_ids=ids, decoder_input_ids=ids).logits
    for dtype, tolerance in ((torch.float32, 2e-3), (torch.bfloat16, 0.1)):
        model = AutoModelForSeq2SeqLM.from_pretrained(
            tmp_path, quantization_config=hfkv.WeightConfig("half", skip=["lm_head"]), dtype=dtype
        )
        # read by T5 in each forward, to choose the dtype of what goes in
        assert model.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == dtype
        after = model(input_ids=ids, decoder_input_ids=ids).logits
        torch.testing.assert_close(after.float(), before, rtol=tolerance, atol=tolerance)
    # what the model wants in float32 is left out by default
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, quantization_config=hfkv.WeightConfig("half"))
    assert type(model.encoder.block[0].layer[1].DenseReluDense.wo) is torch.nn.Linear


def test_another_dtype_or_device_leaves_what_is_stored():
    model = hfkv.quantize_weights(small_model(), hfkv.WeightConfig("rtn"))
    layer = model.model.layers[0].mlp.up_proj
    scale, codes = layer.scale.clone(), layer.codes.clone()
    model.to(torch.bfloat16)
    assert layer.scale.dtype == torch.float16
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.scale, scale)
    assert torch.equal(layer.codes, codes)
    assert logits(model).dtype == torch.bfloat16
    assert model.to("meta").model.layers[0].mlp.up_proj.codes.device.type == "meta"


def test_wrong_layout_of_a_backend_is_an_error_that_names_it():
    class Wrong(HalfLinear):
        def layout(self):
            return {"bytes": ((self.in_features,), torch.uint8)}

    with pytest.raises(RuntimeError, match=r"Wrong\.encode made .*and its layout is"):
        Wrong.quantized(torch.nn.Linear(8, 8), WeightOptions())


# what transformers is told


def test_registered_while_active_and_gone_afterwards():
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["hfkv"] is hfkv.WeightConfig
    hfkv.deactivate()
    try:
        assert "hfkv" not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING
        assert "hfkv" not in auto.AUTO_QUANTIZER_MAPPING
    finally:
        hfkv.activate()
    hfkv.activate()
    assert "hfkv" in auto.AUTO_QUANTIZER_MAPPING


def test_name_that_another_library_took_is_left_to_it(monkeypatch):
    hfkv.deactivate()
    try:
        monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "hfkv", object)
        with pytest.raises(ValueError, match="'hfkv' is taken"):
            hfkv.activate()
        assert auto.AUTO_QUANTIZER_MAPPING["hfkv"] is object
        assert "hfkv" not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    finally:
        monkeypatch.undo()
        hfkv.activate()


def test_loading_names_the_backend_that_is_missing(tmp_path):
    hfkv.quantize_weights(small_model(), hfkv.WeightConfig("half")).save_pretrained(tmp_path)
    hfkv.unregister("halves")
    with pytest.raises(ValueError, match="backend='half' is not known"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_importing_hfkv_and_transformers_loads_no_backend():
    code = (
        "import sys, hfkv; light = not {'torch', 'transformers', 'hfkv.weights'} & sys.modules.keys()\n"
        "import transformers.modeling_utils\n"
        "from transformers.quantizers import auto\n"
        "assert light and 'hfkv' in auto.AUTO_QUANTIZER_MAPPING\n"
        "loaded = [name for name in sys.modules if name.startswith('hfkv_') and not name.endswith('plugin')]\n"
        "assert not [name for name in loaded if '.' in name], loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("rtn", {"nbits": 4, "group_size": 32}),
        ("awq", {"nbits": 3, "group_size": 32, "outlier_features": 2, "calibration_ids": IDS}),
        ("hqq", {"nbits": 4}),
        ("bnb", {"nbits": 4}),
    ],
)
def test_weights_cache_and_assistant_compose(backend, options, dtype):
    """Every token is one that the decoded weights would choose, given those before it."""
    if backend in ("hqq", "bnb"):
        pytest.importorskip({"hqq": "hqq", "bnb": "bitsandbytes"}[backend])
    model = hfkv.quantize_weights(small_model(dtype), hfkv.WeightConfig(backend, **options))
    ids = torch.tensor([IDS[0] * 3])
    plain = model.generate(ids, max_new_tokens=24, do_sample=False)
    drafts = {"texts": [plain[0].tolist()], "num_assistant_tokens_schedule": "constant"}
    output = model.generate(
        ids,
        max_new_tokens=24,
        do_sample=False,
        cache_implementation="kivi",
        cache_config={"nbits": 8, "group_size": 8, "residual_length": 8},
        return_dict_in_generate=True,
        **hfkv.assistant("lookup", model, **drafts),
    )
    assert hfkv.memory(output).packed_bytes > 0
    assert hfkv.stats(output).accepted > 0
    sequences = output.sequences
    assert sequences.shape[1] == ids.shape[1] + 24
    with torch.no_grad():
        scores = copy.deepcopy(model).dequantize()(sequences).logits[0, ids.shape[1] - 1 : -1].float()
    chosen = scores.gather(1, sequences[0, ids.shape[1] :, None])[:, 0]
    # a near-tie may fall either way
    assert ((scores.amax(1) - chosen) / scores.std(1)).max() < (0.02 if dtype == torch.float32 else 0.15)


def test_generate_takes_quantized_weights_and_a_quantized_cache():
    model = hfkv.quantize_weights(small_model(), hfkv.WeightConfig("rtn", nbits=8, granularity="row"))
    ids = torch.tensor(IDS)
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    config = {"nbits": 8, "group_size": 8, "residual_length": 8}
    both = model.generate(
        ids, max_new_tokens=12, do_sample=False, cache_implementation="kivi", cache_config=config,
        return_dict_in_generate=True, prompt_lookup_num_tokens=2,
    )  # fmt: skip
    assert hfkv.memory(both).packed_bytes > 0
    assert torch.equal(both.sequences, plain)
