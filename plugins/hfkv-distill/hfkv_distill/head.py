"""The way from a model's last hidden states to its logits, taken apart from its forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# tokens that the check of a head runs
_TRIED = 3


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Let a module call something else for a while; gives what it called before."""
    own = vars(module).get("forward")
    original = module.forward
    module.forward = forward
    try:
        yield original
    finally:
        del module.forward
        # libraries that place or cast a model have put one of theirs on the instance
        if own is not None:
            module.forward = own


class OutputHead:
    """The head of a causal language model, and what its forward does with the logits afterwards.

    Parameters
    ----------
    model
        The model, not wrapped.

    Raises
    ------
    NotImplementedError
        It has no head, or does with its logits what is not known here.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        module = model.get_output_embeddings()
        if module is None or model.config.is_encoder_decoder:
            raise NotImplementedError(
                f"{type(model).__name__} is not a decoder with a language-modelling head, which distillation needs"
            )
        self.module: nn.Module = module
        self.finish = _finish(model.config.get_text_config(decoder=True))
        self._check()

    @property
    def size(self) -> int:
        """Rows of the vocabulary, padding included."""
        return int(self._model.config.get_text_config(decoder=True).vocab_size)

    def applied(self, original: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """From hidden states to logits as the model's forward makes them; ``original`` is the module's forward."""
        finish = self.finish
        return original if finish is None else lambda hidden_states: finish(original(hidden_states))

    @property
    def forgets_logits(self) -> bool:
        """Whether backward of the head gets along without the logits, so that they may be overwritten."""
        return self.finish is None and type(self.module) is nn.Linear

    @contextmanager
    def taken(
        self, see: Callable[[torch.Tensor, Callable[..., torch.Tensor]], None], *, keep_logits: bool = False
    ) -> Iterator[None]:
        """Show the hidden states of each forward, and compute no logits unless they are to be kept.

        ``see`` is called with ``[batch, tokens, hidden]`` and with the way on to logits.
        """

        def forward(hidden_states: torch.Tensor) -> torch.Tensor:
            see(hidden_states, self.applied(original))
            if keep_logits:
                return original(hidden_states)
            return hidden_states.new_zeros((*hidden_states.shape[:-1], 0))

        with replaced_forward(self.module, forward) as original:
            yield

    @torch.no_grad()
    def _check(self) -> None:
        """Compare logits that are made here with those of the model's own forward."""
        seen: list[torch.Tensor] = []
        ids = torch.arange(_TRIED, device=self._model.device)[None]
        training = self._model.training
        self._model.eval()
        try:
            expected = self._model(input_ids=ids, use_cache=False).logits
            with self.taken(lambda hidden_states, head: seen.append(head(hidden_states))):
                self._model(input_ids=ids, use_cache=False)
        finally:
            self._model.train(training)
        if len(seen) != 1 or not torch.allclose(seen[0].float(), expected.float(), rtol=1e-3, atol=1e-3):
            raise NotImplementedError(
                f"{type(self._model).__name__} changes the logits of its head in a way that distillation does not know"
            )


def _finish(config: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What models do with the logits of their heads; None for most."""
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        return lambda logits: cap * torch.tanh(logits / cap)
    factor = getattr(config, "logit_scale", None)
    if factor is not None:
        return lambda logits: logits * factor
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None:
        return lambda logits: logits / divisor
    return None
