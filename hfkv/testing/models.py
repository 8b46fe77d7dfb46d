"""Tiny models made in memory: seeded, float32, sharp enough that every cached token shows in the logits."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache

from ..integration import cache_argument

VOCABULARY = 96
PADDING = 0
START = 1
PROMPT_LENGTH = 24
NEW_TOKENS = 16
WINDOW = 8

# no experts: an error that sends a token to others says nothing of the cache
_LATENT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "initializer_range": 0.1,
}

# what each family is there for stands in its first comment; the sizes are the smallest that show it
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        # grouped queries
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.1,
    },
    "qwen2": {
        # one KV head, biases, and a head_dim of 20, which no group size divides
        "model_type": "qwen2",
        "hidden_size": 60,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "initializer_range": 0.1,
    },
    "gemma3": {
        # sliding and full layers in turn, the window shorter than the prompt
        "model_type": "gemma3_text",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        "initializer_range": 0.1,
    },
    "gemma4": {
        # the last two layers read the keys and values of those before; full layers have heads of their own size
        "model_type": "gemma4_text",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 24,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": WINDOW,
        "initializer_range": 0.1,
    },
    "t5": {
        # an encoder and cross-attention, and a position bias that depends on the cache's length
        "model_type": "t5",
        "d_model": 48,
        "d_kv": 12,
        "d_ff": 96,
        "num_layers": 4,
        "num_decoder_layers": 4,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "initializer_factor": 1.4,
        "decoder_start_token_id": START,
    },
    "deepseek_v3": {
        # multi-head latent attention: what is cached is a latent as keys and a rotary key as values, of one head
        "model_type": "deepseek_v3",
        **_LATENT,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v2": {
        # the same with its rotary embedding in complex numbers, over neighbours
        "model_type": "deepseek_v2",
        **_LATENT,
    },
}


def _build(family: str) -> Any:
    config: Any = transformers.AutoConfig.for_model(
        vocab_size=VOCABULARY,
        pad_token_id=PADDING,
        bos_token_id=None,
        eos_token_id=None,
        # tied, a random model only repeats its last token
        tie_word_embeddings=False,
        **FAMILIES[family],
    )
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    for name, weight in model.named_parameters():
        # unscaled attention of a random model looks at one token only, and any error may make it another one
        if family in ("gemma4", "t5") and name.endswith(("q_norm.weight", "SelfAttention.q.weight")):
            weight.data *= 0.25
    if family in ("llama", "qwen2"):
        _make_padding_loud(model)
    return model


@torch.no_grad()
def _make_padding_loud(model: Any) -> None:
    """Make the keys of padding thousands of times larger than those of real tokens, in the first layer.

    Real models do this to tokens that carry no meaning. A cache that lets padding into what it stores for real tokens
    (a block's range, a scale) then loses them.
    """
    embedding = model.get_input_embeddings().weight
    projection = model.model.layers[0].self_attn.k_proj.weight
    # padding's embedding is orthogonal to all others, so that only padding meets what is added
    direction = torch.nn.functional.normalize(torch.randn(embedding.shape[1]), dim=0)
    embedding -= (embedding @ direction)[:, None] * direction
    embedding[PADDING] = direction
    loud = 1e4 * projection.norm(dim=1).mean() / embedding.shape[1] ** 0.5
    projection += loud * torch.outer(torch.randn(projection.shape[0]).sign(), direction)


class TinyModel:
    """A tiny model, and how the contracts talk to it, whether it has an encoder or not.

    Token ids are always the decoder's; an encoder reads the same short source for every row.
    """

    def __init__(self, family: str, model: Any) -> None:
        self.family = family
        self.model = model.eval()
        self.is_encoder_decoder: bool = model.config.is_encoder_decoder
        self.cache_argument = cache_argument(model)
        self._source = self._random(1, 9, seed=7)

    def __str__(self) -> str:
        return f"{self.family} with {self.model.config._attn_implementation} attention"

    @staticmethod
    def _random(rows: int, length: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(START + 1, VOCABULARY, (rows, length), generator=generator)

    def prompt(self, rows: int = 1, length: int = PROMPT_LENGTH, seed: int = 0) -> torch.Tensor:
        """Token ids ``[rows, length]``, none of them padding."""
        ids = self._random(rows, length, seed)
        if self.is_encoder_decoder:
            ids[:, 0] = START
        return ids

    def inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The ids, under the names that the model knows them by."""
        if not self.is_encoder_decoder:
            return {"input_ids": ids}
        return {"input_ids": self._source.expand(len(ids), -1), "decoder_input_ids": ids}

    @torch.no_grad()
    def logits(self, sequences: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """One forward of what the cache has not seen of the sequences: ``[rows, tokens, vocabulary]``.

        Padding on the left is masked, as `generate` does it.
        """
        ids = sequences if cache is None else sequences[:, cache.get_seq_length() :]
        arguments: dict[str, Any] = self.inputs(ids) | {"use_cache": cache is not None}
        if cache is not None:
            arguments[self.cache_argument] = cache
        mask = (sequences != PADDING).long()
        if not bool(mask.all()):
            arguments["attention_mask"] = mask
            arguments["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        result: torch.Tensor = self.model(**arguments).logits
        return result

    def feed(self, cache: Cache, sequences: torch.Tensor, chunk: int | None = None) -> torch.Tensor:
        """Forwards of ``chunk`` tokens (None: of all) until the cache has seen the sequences; their logits."""
        if cache.get_seq_length() == 0 and hasattr(decoder_cache(cache), "note_mask"):
            decoder_cache(cache).note_mask(sequences != PADDING)
        parts = []
        while (past := cache.get_seq_length()) < sequences.shape[1]:
            parts.append(self.logits(sequences if chunk is None else sequences[:, : past + chunk], cache))
            if cache.get_seq_length() <= past:
                raise AssertionError(
                    f"{cache} has seen {past} tokens before and after a forward of more: get_seq_length()"
                )
        return torch.cat(parts, dim=1)

    def generate(self, ids: torch.Tensor, **arguments: Any) -> Any:
        """Call `generate` for `NEW_TOKENS` tokens and return the full output with raw logits."""
        # padding stands for nothing where it is generated: the mask of a sequence is read off its tokens
        defaults: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "suppress_tokens": [PADDING]}
        asked = {"return_dict_in_generate": True, "output_logits": True}
        return self.model.generate(**{**self.inputs(ids), **defaults, **arguments, **asked})

    def cache_of(self, output: Any) -> Cache:
        """The cache that `generate` returned."""
        cache: Cache = output[self.cache_argument]
        return cache

    def wrapped(self, cache: Cache) -> Cache:
        """A cache as the model takes it: with one for cross-attention beside it where there is an encoder."""
        if not self.is_encoder_decoder:
            return cache
        return EncoderDecoderCache(cache, DynamicCache(config=self.model.config.get_text_config(decoder=True)))

    def plain_cache(self) -> Cache:
        """Transformers' own default cache."""
        return self.wrapped(DynamicCache(config=self.model.config.get_text_config(decoder=True)))

    @functools.cached_property
    def cost_of_a_token(self) -> float:
        """The unit of ``contract_tolerance``: the least error of the logits when the plain cache loses one token.

        The token's values, or the latent that they are made of, become zero in every full-attention layer; the error is
        the largest of the steps that follow.
        """
        ids = self.prompt(length=PROMPT_LENGTH + NEW_TOKENS, seed=1)
        expected = self.logits(ids)[:, PROMPT_LENGTH:]
        lost = range(1, PROMPT_LENGTH - 1)
        rows = ids.expand(len(lost), -1)
        cache = self.plain_cache()
        self.feed(cache, rows[:, :PROMPT_LENGTH])
        for layer in decoder_cache(cache).layers:
            if type(layer) is DynamicLayer and layer.values is not None:
                states: Any = layer.keys if hasattr(self.model.config, "kv_lora_rank") else layer.values
                for row, position in enumerate(lost):
                    states[row, :, position] = 0
        actual = self.feed(cache, rows, chunk=1)
        return float(logits_error(actual, expected).amax(dim=1).min())

    @functools.cached_property
    def assistant(self) -> Any:
        """A copy that is right about as often as it is wrong, as an assistant for assisted decoding."""
        assistant = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            # a weight of its own: where it is tied, what the assistant reads would change as well
            head = assistant.get_output_embeddings()
            noise = torch.randn(head.weight.shape, generator=generator)
            head.weight = torch.nn.Parameter(head.weight + 0.6 * head.weight.std() * noise)
        settings = assistant.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = 4, "constant"
        settings.assistant_confidence_threshold = 0.0
        return assistant


def decoder_cache(cache: Any) -> Any:
    """The cache of the decoder's own keys and values, without the one for cross-attention."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def logits_error(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Root mean square difference, in units of the expected logits' spread over the vocabulary.

    From ``[rows, tokens, vocabulary]`` to ``[rows, tokens]``.
    """
    difference = (actual.float() - expected.float()).square().mean(dim=-1).sqrt()
    return difference / expected.float().std(dim=-1)


@functools.cache
def load(family: str, attention: str) -> TinyModel:
    """The tiny model of a family with an attention implementation; made once."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = _build(family)
    model.set_attn_implementation(attention)
    return TinyModel(family, model)
