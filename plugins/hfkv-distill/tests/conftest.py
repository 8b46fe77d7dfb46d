"""Tiny models, ragged examples, and a trainer of them."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hfkv.testing.models import logits_error

VOCABULARY = 48

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
# what a family needs besides
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    # windows, kinds of layers, norms that multiply by one more
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8},
    # heads that are turned in part
    "stablelm": {"head_dim": 8},
}


def make_llama(seed: int = 0, **changes):
    """A random decoder; the teacher and the student of a test differ by their seeds."""
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))


def make_rows(count: int = 8, seed: int = 0):
    """Examples of different lengths with prompts of different lengths; one has no target at all."""
    generator = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    rows = []
    for index in range(count):
        length = number(6, 20)
        ids = torch.randint(2, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: length if index == 2 else number(1, 5)] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


@pytest.fixture(autouse=True)
def one_thread():
    """On sizes like these a second thread costs more than it brings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def made():
    """A function that makes a tiny model of a family, with norms and biases that are not all zero or one."""

    def make(family: str, **changes):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {}), **changes})
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("norm.weight", "bias")):
                    parameter.add_(0.2 * torch.randn_like(parameter))
        return model

    return make


@pytest.fixture(scope="session")
def tokens():
    """A function that makes token ids of such a model."""

    def make(rows: int = 2, length: int = 24):
        return torch.randint(1, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(1))

    return make


@pytest.fixture(scope="session")
def error(tokens):
    """How far two models' logits are apart."""

    @torch.no_grad()
    def between(actual, expected, ids=None):
        ids = tokens() if ids is None else ids
        return float(logits_error(*(model(ids, use_cache=False).logits for model in (actual, expected))).max())

    return between


@pytest.fixture
def llama():
    return make_llama


@pytest.fixture
def ragged():
    return make_rows


@pytest.fixture
def trainer(tmp_path):
    """A function that makes a trainer of a student with seed 1 and a teacher with seed 0."""
    from hfkv_distill import DistillationConfig, DistillationTrainer

    def make(student=None, teacher="plain", data=None, evaluated=None, callbacks=None, **settings):
        defaults = {
            "output_dir": str(tmp_path / "out"), "max_steps": 3, "per_device_train_batch_size": 4,
            "learning_rate": 1e-2, "report_to": [], "logging_steps": 1, "save_strategy": "no", "use_cpu": True,
            "disable_tqdm": True, "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
        }  # fmt: skip
        return DistillationTrainer(
            model=make_llama(1) if student is None else student,
            teacher_model=make_llama(0) if teacher == "plain" else teacher,
            args=DistillationConfig(**{**defaults, **settings}),
            train_dataset=make_rows() if data is None else data,
            eval_dataset=evaluated,
            callbacks=callbacks,
        )

    return make


@pytest.fixture(scope="session")
def model_of_bytes(tmp_path_factory):
    """A folder with a random model whose tokens are bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, bos_token_id=None, eos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
