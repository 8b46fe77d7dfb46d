"""A decoder layer that predicts the model's next hidden state from the last one and the token that was chosen.

Li, Wei, Zhang, Zhang, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

from .base import DraftHeads, sizes


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """The shape of an `EagleHead`: that of a decoder of the Llama family.

    Attributes
    ----------
    hidden_size, vocab_size
        The model's.
    intermediate_size, num_attention_heads, num_key_value_heads, head_dim, rope_theta, rms_norm_eps
        Of the layer.
    num_layers
        Decoder layers, one in the paper.
    draft_vocab_size
        Tokens that are drafted (`DraftHeads.draft_vocabulary`); None for all.
    """

    hidden_size: int
    vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    num_layers: int = 1
    draft_vocab_size: int | None = None


class EagleHead(DraftHeads):
    """From the embedding of token ``t`` and the model's hidden state of ``t - 1``, the hidden state of ``t``.

    `draft_output` makes of it the logits of token ``t + 1``. Tokens keep the model's own places: the
    first one has no hidden state before it and gets zeros (`shift`), where the paper leaves the token out.
    """

    kind: ClassVar[str] = "eagle"
    Config: ClassVar[type[EagleConfig]] = EagleConfig
    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.join = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.decoder = LlamaModel(
            LlamaConfig(
                # the embeddings are the model's
                vocab_size=1,
                pad_token_id=None,
                bos_token_id=None,
                eos_token_id=None,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                rms_norm_eps=config.rms_norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            )
        )
        del self.decoder.embed_tokens

    @classmethod
    def for_model(cls, model: Any, **options: Any) -> Self:
        """A head for a model, with a layer of the size of the model's; ``options`` are fields of `EagleConfig`."""
        config = model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        rope = getattr(config, "rope_parameters", None) or {}
        found = {
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "rope_theta": float(rope.get("rope_theta", EagleConfig.rope_theta)),
            "rms_norm_eps": getattr(config, "rms_norm_eps", EagleConfig.rms_norm_eps),
        }
        head = cls(EagleConfig(**sizes(model), **{**found, **options}))
        return head.to(device=model.device, dtype=model.dtype)

    def forward(self, embeddings: torch.Tensor, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Predicted hidden states ``[rows, tokens, hidden_size]``.

        Parameters
        ----------
        embeddings
            ``[rows, tokens, hidden_size]``: the tokens, from ``model.get_input_embeddings()``.
        hidden_states
            ``[rows, tokens, hidden_size]``: of the token before each, the model's or predicted.
        **kwargs
            ``attention_mask``, ``position_ids``, the cache: as for the decoder of a Llama.
        """
        joined = self.join(torch.cat([embeddings, hidden_states], dim=-1))
        result: torch.Tensor = self.decoder(inputs_embeds=joined, **kwargs).last_hidden_state
        return result


def shift(hidden_states: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The hidden state of the token before each of ``tokens + 1``, zeros where there is none.

    Parameters
    ----------
    hidden_states
        ``[rows, tokens, hidden_size]``.
    mask
        ``[rows, tokens]``, zero for padding, whose hidden states count as none.
    """
    if mask is not None:
        hidden_states = hidden_states * mask.unsqueeze(-1).to(hidden_states.dtype)
    return nn.functional.pad(hidden_states, (0, 0, 1, 0))
