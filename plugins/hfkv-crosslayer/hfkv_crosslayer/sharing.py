"""Layers that share keys and values as a property of the model: with a cache, without, and in training."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel, cache_utils

from .groups import Groups, checked, donors, neighbours
from .layer import kinds_of
from .similar import similar_groups

NAME = "crosslayer"
# how one forward's keys and values travel from layer to layer: a keyword argument that models hand on
_KEYWORD = "hfkv_shared_states"
# what makes keys and values out of hidden states
_PROJECTIONS = ("k_proj", "v_proj")
_NORMS = ("k_norm", "v_norm")


def share(
    model: PreTrainedModel,
    groups: Sequence[Sequence[int]] | int,
    *,
    map: str = "neighbours",
    input_ids: torch.Tensor | None = None,
) -> PreTrainedModel:
    """Let groups of layers share one set of keys and values, with a cache, without, and in training.

    The first layer of a group computes them; the others read them and lose their own projections, weights included. The
    model predicts worse than before until it is trained. It is changed in place, its config says so, and what
    `save_pretrained` writes needs hfkv-crosslayer to be loaded: transformers alone fails with a size mismatch.

    Parameters
    ----------
    model
        A decoder whose attention has ``k_proj`` and ``v_proj``.
    groups
        Lists of layers, e.g. ``[[0], [1, 2], [3, 4, 5]]``; a layer that is not named stays alone. A number: groups of
        so many layers, which ``map`` chooses.
    map
        ``"neighbours"``, or ``"similar"``: those that `similar_groups` finds on ``input_ids``.
    input_ids
        ``[rows, tokens]`` of text, which ``map="similar"`` needs.

    Returns
    -------
    PreTrainedModel
        The same model.

    Raises
    ------
    ValueError
        Groups that the layers do not allow, or a model that shares already.
    NotImplementedError
        A model with an encoder, with fused projections, or one that shares natively.
    """
    config: Any = model.config.get_text_config(decoder=True)
    stored = dict(getattr(config, "hfkv", None) or {})
    if NAME in stored:
        raise ValueError(f"the layers of this model share already: {stored[NAME]['groups']}. Load it anew")
    if model.config.is_encoder_decoder:
        raise NotImplementedError(f"{type(model).__name__} has an encoder; decoders alone can share in training")
    if _shares_natively(config):
        raise NotImplementedError(f"{type(model).__name__} shares keys and values natively, and keeps to it")
    kinds = kinds_of(config)
    if isinstance(groups, int):
        groups = _chosen(model, groups, map, input_ids)
    elif map != "neighbours":
        raise ValueError(
            f"map={map!r} chooses groups, and they are given: {groups!r}. Pass a number of layers, or no map"
        )
    decided = checked(groups, kinds)
    _check_shapes(model, decided)
    _check_keyword(model)
    restore(model, decided)
    config.hfkv = {**stored, NAME: {"groups": decided}}
    return model


def _chosen(model: PreTrainedModel, share: int, map: str, input_ids: torch.Tensor | None) -> Groups:
    if share < 2:
        raise ValueError(f"groups={share}: a group of layers that share has at least 2")
    if map == "neighbours":
        return neighbours(kinds_of(model.config), share)
    if map == "similar":
        return similar_groups(model, input_ids=input_ids, share=share)
    raise ValueError(f"map={map!r} is not known. Choose from: neighbours, similar")


def restore(model: Any, groups: Groups) -> None:
    """Change the modules of a model that has not been changed; what `from_pretrained` calls."""
    attentions = _attentions(model)
    decoder = _decoder(model, len(attentions))
    if decoder is None:
        return
    borrowing = donors(groups)
    if hasattr(cache_utils, "DummyLayer"):
        # where transformers knows layers without a cache of their own, it makes none for these
        model.config.kv_sharing_modes = ["reuse" if index in borrowing else None for index in range(len(attentions))]
    decoder.register_forward_pre_hook(_begin, with_kwargs=True)
    for index, attention in attentions.items():
        attention.hfkv_donor = borrowing.get(index)
        attention.register_forward_pre_hook(_exchange, with_kwargs=True)
        if index in borrowing:
            for name in _PROJECTIONS:
                setattr(attention, name, BorrowedProjection(getattr(attention, name)))
            for name in _NORMS:
                if isinstance(getattr(attention, name, None), nn.Module):
                    setattr(attention, name, BorrowedNorm(getattr(attention, name)))


class BorrowedProjection(nn.Module):
    """Where a projection was: nothing is computed, and attention drops what comes out.

    Its empty weight takes the place of the projection's in a saved model: who loads it without hfkv meets an error, and
    no random projection.
    """

    def __init__(self, projection: Any) -> None:
        super().__init__()
        self.out_features = projection.out_features
        self.register_buffer("weight", torch.empty(0, dtype=projection.weight.dtype, device=projection.weight.device))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Zeros of the projection's shape, without storage: ``[batch, tokens, out_features]``."""
        return hidden_states.new_zeros(()).expand(*hidden_states.shape[:-1], self.out_features)


class BorrowedNorm(nn.Module):
    """Where the norm of a projection was."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(0, dtype=norm.weight.dtype, device=norm.weight.device))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """What came in."""
        return states


class _Forward:
    """The keys and values of one forward, by layer."""

    def __init__(self) -> None:
        self.states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.has_gradients = torch.is_grad_enabled()


class _Exchange:
    """What attention takes for its cache: a donor's keys and values go through it, a borrower gets them from it.

    Attributes
    ----------
    cache
        The model's own, or None.
    """

    def __init__(self, cache: Any, forward: _Forward, donor: int | None) -> None:
        self.cache = cache
        self._forward = forward
        self._donor = donor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the model's cache, if there is one."""
        return 0 if self.cache is None else int(self.cache.get_seq_length(layer_idx))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values for this layer's attention."""
        if self._donor is not None:
            self._keep_place(key_states, value_states, layer_idx)
            return self._forward.states[self._donor]
        if self._forward.has_gradients and not torch.is_grad_enabled():
            raise NotImplementedError(
                "gradient checkpointing with use_reentrant=True loses the gradients of shared keys and values. Fix: "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        states = key_states, value_states
        if self.cache is not None:
            states = self.cache.update(key_states, value_states, layer_idx, *args, **kwargs)
        # checkpointing runs a layer again: those that read it keep the states whose gradients reach it
        self._forward.states.setdefault(layer_idx, states)
        return states

    def _keep_place(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int) -> None:
        """Give a layer that stays empty its shape: transformers crops and reorders it with the others."""
        layers = getattr(self.cache, "layers", None)
        if layers is None:
            return
        if layer_idx >= len(layers) or (
            isinstance(layers[layer_idx], cache_utils.DynamicLayer) and not layers[layer_idx].is_initialized
        ):
            self.cache.update(key_states[:, :, :0], value_states[:, :, :0], layer_idx)


def _begin(decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, _KEYWORD: _Forward()}


def _exchange(attention: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    kwargs = dict(kwargs)
    forward = kwargs.pop(_KEYWORD, None)
    if forward is None:
        raise NotImplementedError(
            f"{type(attention).__name__} was not given what its model's forward handed out: the layers of this model "
            "pass no keyword arguments on, and cannot share"
        )
    name = "cache" if "cache" in inspect.signature(attention.forward).parameters else "past_key_values"
    kwargs[name] = _Exchange(kwargs.get(name), forward, attention.hfkv_donor)
    return args, kwargs


def _attentions(model: Any) -> dict[int, Any]:
    """The attention modules with projections of their own, by layer."""
    return {
        module.layer_idx: module
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and all(isinstance(getattr(module, name, None), nn.Module) for name in _PROJECTIONS)
        and not hasattr(module, "hfkv_donor")
    }


def _decoder(model: Any, count: int) -> nn.Module | None:
    """The module that runs the layers; None where there is nothing left to change."""
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and 0 < len(layers) == count:
            return cast(nn.Module, module)
    return None


def _shares_natively(config: Any) -> bool:
    return bool(getattr(config, "num_kv_shared_layers", 0)) or "reuse" in (
        getattr(config, "kv_sharing_modes", None) or ()
    )


def _check_shapes(model: Any, groups: Groups) -> None:
    attentions = _attentions(model)
    decoder = _decoder(model, len(attentions))
    if decoder is None or sorted(attentions) != sorted(index for group in groups for index in group):
        raise NotImplementedError(
            f"{type(model).__name__} has attention without {' and '.join(_PROJECTIONS)} of its own, so its layers "
            "cannot share in training. The cache 'crosslayer' needs none"
        )
    for donor, *borrowers in groups:
        for index in borrowers:
            for name in _PROJECTIONS:
                ours, theirs = (getattr(attentions[layer], name).out_features for layer in (index, donor))
                if ours != theirs:
                    raise ValueError(
                        f"groups={groups!r}: layers of one group must have one shape, and {name} has {ours} outputs "
                        f"in layer {index} and {theirs} in layer {donor}"
                    )


@torch.no_grad()
def _check_keyword(model: Any) -> None:
    """Run one token, and see whether every layer hands to its attention what its model's forward was handed."""
    attentions = _attentions(model)
    decoder = cast(nn.Module, _decoder(model, len(attentions)))
    reached: list[Any] = []

    def note(attention: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if _KEYWORD in kwargs:
            reached.append(attention)
        return args, {name: value for name, value in kwargs.items() if name != _KEYWORD}

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in attentions.values()]
    handles.append(decoder.register_forward_pre_hook(_begin, with_kwargs=True))
    training = model.training
    model.eval()
    try:
        model(torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    if len(reached) < len(attentions):
        raise NotImplementedError(
            f"the layers of {type(model).__name__} pass no keyword arguments on to attention, and layers share through "
            "one. The cache 'crosslayer' needs none"
        )
