"""How fast a model can be on a card: the longer of moving bytes and of multiplying, part by part.

Williams et al., "Roofline: An Insightful Visual Performance Model for Multicore Architectures", 2009. Real runs are
slower: nothing here knows of launches, of communication, or of kernels that reach less than the card's peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cards import Card
from .plan import CachePlan
from .plan_model import PlanModel
from .plan_weights import WeightFormat


@dataclass(frozen=True)
class Part:
    """One part of a forward.

    Attributes
    ----------
    moved
        Bytes that are read or written.
    operations
        Multiplications and additions.
    """

    name: str
    moved: float
    operations: float

    @property
    def intensity(self) -> float:
        """Operations for each byte: below the card's, the bandwidth decides."""
        return self.operations / self.moved

    def seconds(self, card: Card) -> float:
        """The longer of the two."""
        return max(self.moved / card.bandwidth, self.operations / card.flops)


@dataclass(frozen=True)
class Forward:
    """A forward's parts, one after the other."""

    parts: tuple[Part, ...]

    def seconds(self, card: Card) -> float:
        """The time of all parts."""
        return sum(part.seconds(card) for part in self.parts)


class Roofline:
    """Times of a model with a weight format and a cache on a card."""

    def __init__(self, model: PlanModel, weights: WeightFormat, cache: CachePlan, card: Card) -> None:
        self.model, self.weights, self.cache, self.card = model, weights, cache, card
        self.weight_bytes = weights.bytes_of(model.parameters)
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // model.heads
        # of each query with a key, and of each weight with a value
        self._per_pair = 4 * len(model.shapes) * model.heads * head_dim

    def decode(self, batch_size: int, context: float, new_tokens: int = 1) -> Forward:
        """One step for a batch: weights are read once for all rows, each row's cache once for itself."""
        tokens = batch_size * new_tokens
        read = batch_size * self.cache.bytes(max(1, round(context)))
        return Forward(
            (
                Part("weights", self._weights_read(tokens), 2 * self.model.parameters.active * tokens),
                Part("cache", read, self._per_pair * tokens * context),
            )
        )

    def prefill(self, tokens: int, batch_size: int = 1) -> Forward:
        """A prompt: causal attention sees half of all pairs; its cache is written once."""
        return Forward(
            (
                Part(
                    "weights",
                    self._weights_read(batch_size * tokens),
                    2 * self.model.parameters.active * batch_size * tokens,
                ),
                Part("cache", self.cache.bytes(tokens, batch_size), self._per_pair * batch_size * tokens**2 / 2),
            )
        )

    def _weights_read(self, tokens: int) -> float:
        """Bytes of weights that a forward reads: of the experts, those that at least one of its tokens takes."""
        parameters = self.model.parameters
        left_out = parameters.experts * (1 - parameters.chosen) ** tokens
        return self.weight_bytes * (1 - left_out / parameters.total)

    def step_seconds(self, batch_size: int, context: float) -> float:
        """Seconds of one decode step."""
        return self.decode(batch_size, context).seconds(self.card)

    def tokens_per_second(self, batch_size: int, context: float) -> float:
        """Of all rows together."""
        return batch_size / self.step_seconds(batch_size, context)


@dataclass(frozen=True)
class Speculation:
    """What drafting ``draft_length`` tokens brings.

    Attributes
    ----------
    expected_tokens
        Tokens that one round yields, the target's own included.
    cost
        Time of a round, in plain decode steps.
    """

    draft_length: int
    expected_tokens: float
    cost: float

    @property
    def speedup(self) -> float:
        """Tokens for each plain step's time."""
        return self.expected_tokens / self.cost


def expected_tokens(acceptance: float, draft_length: int) -> float:
    """Tokens of a round whose drafts are each accepted with that probability: ``(1 - a^(g+1)) / (1 - a)``.

    Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023.

    Raises
    ------
    ValueError
        A probability outside 0 to 1, or a negative length.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"--acceptance {acceptance} must lie between 0 and 1")
    if draft_length < 0:
        raise ValueError(f"--draft-length {draft_length} must not be negative")
    if acceptance == 1:
        return draft_length + 1.0
    return (1 - acceptance ** (draft_length + 1)) / (1 - acceptance)


def speculation(
    roofline: Roofline, acceptance: float, draft_length: int, draft_cost: float, batch_size: int, context: float
) -> Speculation:
    """A round: ``draft_length`` steps of the draft, then one forward of the target over all of them and one more.

    Parameters
    ----------
    draft_cost
        A draft step's time, in the target's.
    """
    verify = roofline.decode(batch_size, context, draft_length + 1).seconds(roofline.card)
    cost = draft_length * draft_cost + verify / roofline.step_seconds(batch_size, context)
    return Speculation(draft_length, expected_tokens(acceptance, draft_length), cost)
