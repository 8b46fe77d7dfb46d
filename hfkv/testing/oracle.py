"""What is right: the plain model without a cache, and the same cache in an equivalent execution.

Tokens are never compared: on random models they agree or disagree by luck. Every step's logits are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import Cache

from ..cache.layer import KVLayer
from ..defaults import set_default
from .cases import CacheCase
from .forgetting import Pattern, forgetting
from .models import PROMPT_LENGTH, decoder_cache, load, logits_error

# what float32 leaves between two orders of summation
LOSSLESS = 1e-4
# between two executions of one lossy cache: such noise may move a code to its neighbour
SAME = 0.02


class Judge:
    """Compares what one cache made on one tiny model, and words the verdict."""

    def __init__(self, case: CacheCase, family: str, attention: str) -> None:
        self.case = case
        self.tiny = load(family, attention)

    def cache(self, **options: Any) -> Cache:
        """An empty cache of the case, as the model takes it."""
        return self.tiny.wrapped(self.case.make(self.tiny.model, **options))

    def filled(self, sequences: torch.Tensor, prompt_length: int = PROMPT_LENGTH) -> Cache:
        """A cache that has seen the sequences: the prompt in one forward, then token by token."""
        cache = self.cache()
        if sequences.shape[1] > 0:
            self.tiny.feed(cache, sequences[:, :prompt_length])
        if sequences.shape[1] > prompt_length:
            self.tiny.feed(cache, sequences, chunk=1)
        return cache

    def generate(self, ids: torch.Tensor, **arguments: Any) -> Any:
        """Call `generate` with the cache asked for by name; check that it is what ran.

        Skips, visibly, what this release of transformers cannot do with its own cache either.
        """
        case = self.case
        asked = {"cache_implementation": case.spec.name, "cache_config": case.options_for(self.tiny.model)}
        try:
            output = self.tiny.generate(ids, **asked, **arguments)
        except NotImplementedError:
            raise
        except Exception:
            try:
                self.tiny.generate(ids, **arguments)
            except Exception as error:
                version = transformers.__version__
                pytest.skip(f"transformers {version} fails here with its own cache: {type(error).__name__}: {error}")
            raise
        self.is_ours(self.tiny.cache_of(output))
        return output

    def is_ours(self, cache: Cache) -> None:
        """Fail unless the technique's own layers stand where it applies."""
        layers = decoder_cache(cache).layers
        if not any(isinstance(layer, self.case.layer_class) for layer in layers):
            kinds = [type(layer).__name__ for layer in layers]
            raise AssertionError(f"{self.case} was asked for, and {self.tiny} ran with layers {kinds}")

    @contextmanager
    def capability(self, flag: str) -> Iterator[None]:
        """Both answers of a spec's flag: what stands inside works, or raises NotImplementedError that says so."""
        case = self.case
        if getattr(case.spec, flag):
            try:
                yield
            except NotImplementedError as error:
                raise AssertionError(
                    f"{case} declares {flag}=True, and {self.tiny} met NotImplementedError: {error}. "
                    f"Implement it, or declare {flag}=False in the CacheSpec"
                ) from error
            return
        with pytest.raises(NotImplementedError) as caught:
            yield
        message = str(caught.value)
        for word in (case.spec.name, flag):
            if word not in message:
                raise AssertionError(
                    f"{case} declares {flag}=False; its error must name {word!r}, and says: {message!r}"
                )

    def generated(self, output: Any) -> torch.Tensor:
        """The raw logits that chose each new token: ``[sequences, new tokens, vocabulary]``."""
        steps = torch.stack(output.logits, dim=1)
        beams = output.get("beam_indices")
        if beams is None:
            return steps
        return steps[beams, torch.arange(steps.shape[1])]

    def plain(self, sequences: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """The logits that the model without a cache gives for the newest tokens of a sequence without padding."""
        return self.logits(sequences)[:, -new_tokens - 1 : -1]

    def logits(self, sequences: torch.Tensor) -> torch.Tensor:
        """What the logits have to be: those of one forward without a cache, or with the technique's reference.

        A technique that forgets says what may be seen; its sequences have no padding.
        """
        with self.forgetting(sequences.shape[1]):
            return self.tiny.logits(sequences, self.reference())

    def reference(self) -> Cache | None:
        """The cache that the right logits need: none, or the technique's reference, new for one forward."""
        reference = self.case.reference(self.tiny.model)
        return None if reference is None else self.tiny.wrapped(reference)

    @contextmanager
    def forgetting(self, length: int) -> Iterator[None]:
        """Let the model without a cache see of sequences of this length what the technique lets it see."""
        patterns = self._patterns(length)
        with forgetting(self.tiny.model, patterns) if patterns else nullcontext():
            yield

    def _patterns(self, length: int) -> dict[int, Pattern]:
        layers = enumerate(decoder_cache(self.cache()).layers)
        asked = {index: layer.attended(length) for index, layer in layers if isinstance(layer, KVLayer)}
        return {index: pattern for index, pattern in asked.items() if pattern is not None}

    def assistant(self) -> Any:
        """An assistant that is often right: it computes, and forgets, what the technique does."""
        assistant = self.tiny.assistant
        if self._patterns(1) or self.case.spec.contract_reference is not None:
            assistant = copy.deepcopy(assistant)
            set_default(assistant, self.case.spec.name, **self.case.options_for(assistant))
        return assistant

    def replay(self, sequences: torch.Tensor, prompt_length: int, chunk: int | None = None) -> torch.Tensor:
        """The logits of the same cache in a manual loop: the prompt (in chunks), then token by token."""
        cache = self.cache()
        prompt = self.tiny.feed(cache, sequences[:, :prompt_length], chunk)
        return torch.cat([prompt[:, -1:], self.tiny.feed(cache, sequences[:, :-1], chunk=1)], dim=1)

    def faithful(self, actual: torch.Tensor, expected: torch.Tensor, what: str, hint: str = "") -> None:
        """Fail unless logits are those of the plain model, within what the spec declares.

        A cache with ``contract_tolerance=None`` has no such bound and skips, visibly.
        """
        spec = self.case.spec
        if spec.lossless:
            self._compare(actual, expected, LOSSLESS, "lossless=True allows", what, "the plain model's", hint)
        elif spec.contract_tolerance is None:
            pytest.skip(f"{spec.name} declares contract_tolerance=None: it is compared only with itself")
        else:
            allowed = spec.contract_tolerance * self.tiny.cost_of_a_token
            why = (
                f"contract_tolerance={spec.contract_tolerance} of {self.tiny.cost_of_a_token:.3f}, the cost of losing "
                "one cached token, allows"
            )
            self._compare(actual, expected, allowed, why, what, "the plain model's", hint)

    def same(self, actual: torch.Tensor, expected: torch.Tensor, what: str, than: str, hint: str = "") -> None:
        """Fail unless logits are those of the same cache in an equivalent execution."""
        allowed = LOSSLESS if self.case.spec.lossless else max(LOSSLESS, SAME * self.tiny.cost_of_a_token)
        self._compare(actual, expected, allowed, "equivalent executions may differ by", what, than, hint)

    def _compare(
        self, actual: torch.Tensor, expected: torch.Tensor, allowed: float, why: str, what: str, than: str, hint: str
    ) -> None:
        if actual.shape != expected.shape:
            raise AssertionError(f"{self._where(what)}: logits {tuple(actual.shape)}, expected {tuple(expected.shape)}")
        error = logits_error(actual, expected).nan_to_num(nan=torch.inf)
        worst = float(error.max())
        if worst <= allowed:
            return
        bad = (error > allowed).nonzero()
        row, step = bad[0].tolist()
        raise AssertionError(
            f"{self._where(what)}: the logits are not {than}: they differ by {worst:.3g}, and {why} {allowed:.3g}. "
            f"{len(bad)} of {error.numel()} rows and steps are wrong, the first is row {row}, step {step}."
            f"{f' Likely: {hint}.' if hint else ''}"
        )

    def _where(self, what: str) -> str:
        return f"{self.case} on {self.tiny}, {what}"
