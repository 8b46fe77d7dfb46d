"""``hfkv inspect`` as a function: what a model's keys, values, attention and weights look like, and what they ask for.

Outlier channels of keys: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", 2024. Attention
sinks: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023. Outlier dimensions of the
residual stream: Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", 2022. Massive
activations: Sun et al., "Massive Activations in Large Language Models", 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import text
from .geometry import Trial, trials
from .progress import Silent, Watcher
from .recording import Call, record

# a channel is an outlier from this multiple of the median channel of its layer
CHANNEL_OUTLIER = 4.0
# a dimension of the residual stream likewise
DIMENSION_OUTLIER = 6.0
# a token of attention's few: one in twenty
FEW = 0.05
SINKS = 4
SIGMAS = 6.0


@dataclass(frozen=True)
class Channels:
    """The channels of one layer's keys or values.

    Attributes
    ----------
    magnitude
        Mean absolute value of each channel over the tokens, ``kv_heads * head_dim`` numbers.
    outliers
        Channels whose magnitude is more than `CHANNEL_OUTLIER` times the median channel's.
    steadiness
        Share of tokens in which an outlier channel is above twice the median channel's magnitude; None without one.
    """

    magnitude: list[float]
    outliers: list[int]
    steadiness: float | None

    @property
    def largest(self) -> float:
        """The largest channel's magnitude in units of the median channel's."""
        middle = float(torch.tensor(self.magnitude).median())
        return max(self.magnitude) / middle if middle else 0.0


@dataclass(frozen=True)
class Attention:
    """Where one layer's late queries look.

    Attributes
    ----------
    sinks
        Share of the attention on the first `SINKS` tokens.
    few
        Share of the attention on the strongest `FEW` of the tokens.
    ninety
        How many tokens hold 90 % of the attention, on average over heads and queries.
    """

    sinks: float
    few: float
    ninety: float


@dataclass(frozen=True)
class Layer:
    """One full-attention layer."""

    layer: int
    keys: Channels
    values: Channels
    attention: Attention


@dataclass(frozen=True)
class Residual:
    """The residual stream after one block.

    Attributes
    ----------
    outliers
        Dimensions whose root mean square over the tokens, the first left out, is more than `DIMENSION_OUTLIER` times
        the median dimension's.
    largest
        The largest absolute value in units of the median one.
    token, dimension
        Where that is.
    """

    block: int
    outliers: list[int]
    largest: float
    token: int
    dimension: int


@dataclass(frozen=True)
class Matrix:
    """One weight matrix.

    Attributes
    ----------
    beyond
        How many weights lie more than `SIGMAS` standard deviations from the mean.
    largest
        The largest distance from the mean, in standard deviations.
    """

    name: str
    weights: int
    beyond: int
    largest: float


@dataclass(frozen=True)
class Inspection:
    """Everything that was seen.

    Attributes
    ----------
    tokens, queries
        Tokens that were read, and how many of the last ones' queries were looked at.
    geometry
        Errors at the attention output under different geometries.
    """

    tokens: int
    queries: int
    layers: list[Layer]
    residual: list[Residual]
    matrices: list[Matrix]
    geometry: list[Trial]


def inspect(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    content: str,
    tokens: int = 1024,
    queries: int = 64,
    steps: Watcher | None = None,
) -> Inspection:
    """Look at a model while it reads a text.

    Raises
    ------
    ValueError
        Too few tokens for the queries, or a text that is too short.
    NotImplementedError
        No layer attends to all tokens, or attention cannot be seen.
    """
    if not 0 < queries < tokens:
        raise ValueError(f"queries={queries} must be at least 1 and less than tokens={tokens}")
    steps = steps or Silent()
    steps.expect(4)
    (window,) = text.windows(text.encode(tokenizer, content), 1, tokens, text.start(tokenizer))
    with torch.no_grad():
        steps.step("keys, values and attention")
        calls = [call for call in record(model, window, queries) if not call.is_sliding]
        if not calls:
            raise NotImplementedError(f"{type(model).__name__} has no layer that attends to all tokens")
        layers = [
            Layer(call.layer, channels(call.key), channels(call.value), attention(call.weights(call.key)))
            for call in calls
        ]
        steps.done()
        steps.step("geometries")
        geometry = trials(calls)
        steps.done()
        steps.step("residual stream")
        stream = _residual(model, window)
        steps.done()
        steps.step("weights")
        weights = matrices(model)
        steps.done()
    return Inspection(tokens, queries, layers, stream, weights, geometry)


def channels(states: torch.Tensor) -> Channels:
    """The channels of ``[batch, kv_heads, tokens, head_dim]``."""
    # [tokens, kv_heads * head_dim]
    size = states[0].float().abs().transpose(0, 1).flatten(1)
    magnitude = size.mean(0)
    middle = magnitude.median()
    outliers = (magnitude > CHANNEL_OUTLIER * middle).nonzero()[:, 0]
    steady = float((size[:, outliers] > 2 * middle).float().mean()) if len(outliers) else None
    return Channels(magnitude.tolist(), outliers.tolist(), steady)


def attention(weights: torch.Tensor) -> Attention:
    """Where the attention weights ``[batch, heads, queries, tokens]`` lie."""
    tokens = weights.shape[-1]
    ordered = weights.sort(dim=-1, descending=True).values
    few = ordered[..., : max(1, round(FEW * tokens))].sum(-1).mean()
    ninety = (ordered.cumsum(-1) < 0.9).sum(-1).add(1).float().mean()
    return Attention(float(weights[..., :SINKS].sum(-1).mean()), float(few), float(ninety))


def _residual(model: PreTrainedModel, window: torch.Tensor) -> list[Residual]:
    # without the head: its logits would be the largest tensor of the run
    output = model.get_decoder()(window.to(model.device), output_hidden_states=True, use_cache=False)
    return [residual(block, states[0]) for block, states in enumerate(output.hidden_states)]


def residual(block: int, states: torch.Tensor) -> Residual:
    """The residual stream ``[tokens, hidden_size]`` after a block; 0 is the embedding."""
    size = states.float().abs()
    # the first token often carries values of its own, hundreds of times larger
    spread = states[1:].float().square().mean(0).sqrt()
    outliers = (spread > DIMENSION_OUTLIER * spread.median()).nonzero()[:, 0].tolist()
    token, dimension = divmod(int(size.argmax()), size.shape[1])
    return Residual(block, outliers, float(size.max() / size.median()), token, dimension)


def matrices(model: PreTrainedModel) -> list[Matrix]:
    """The weight matrices of all linear layers."""
    result = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.detach().float()
            distance = (weight - weight.mean()).abs() / weight.std()
            beyond = int((distance > SIGMAS).sum())
            result.append(Matrix(name, weight.numel(), beyond, float(distance.max())))
    return result


def mass(calls: Sequence[Call]) -> torch.Tensor:
    """``[layers, tokens]``: the attention that each token receives, averaged over heads and queries."""
    return torch.stack([call.weights(call.key)[0].mean((0, 1)) for call in calls])
