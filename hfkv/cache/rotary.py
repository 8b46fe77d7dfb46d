"""How a model turns a query when its position moves, found by asking the model itself.

A rotary embedding (Su et al., "RoFormer", 2021) turns pairs of channels by an angle that grows with the position.
Models differ in the angles (linear, dynamic, YaRN, llama3 scaling), in what makes a pair (halves, neighbours), in which
channels turn (all, the first, the last), and layer by layer in whether anything turns at all. One forward of single
tokens at several positions shows all of it: without a past, a token's states do not depend on its position, so two
queries of one token differ by the rotation alone. The angles are the rotary module's own, in float32.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import attention, integration

_POSITIONS = (0, 1, 7)
_TOKENS = 4
# a bfloat16 model's own rounding is below; a wrong layout or a wrong set of angles is far above
_TOLERANCE = 0.03
_ABSOLUTE = 'Fix: positions="absolute"'


class Angles:
    """The angles of a rotary module, per position, by pair of channels, as they are at this moment.

    Kept for modules whose angles change with the length of the sequence; a pickle leaves the module behind.
    """

    def __init__(self, module: torch.nn.Module, keywords: dict[str, Any]) -> None:
        self._module: weakref.ref[torch.nn.Module] | None = weakref.ref(module)
        self._keywords = keywords

    def __deepcopy__(self, memo: dict[int, Any]) -> Angles:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"_module": None, "_keywords": self._keywords}

    def __call__(self) -> tuple[float, ...]:
        """The angles now.

        Raises
        ------
        NotImplementedError
            The model is gone.
        """
        module = None if self._module is None else self._module()
        if module is None:
            raise NotImplementedError(
                "the angles of this model's rotary embedding change with the length, and the cache that was loaded or "
                f"outlived its model cannot ask for them. {_ABSOLUTE}"
            )
        return _angles_of(_ask(module, torch.tensor([[0, 1]]), self._keywords), 1)


@dataclass(frozen=True)
class Rotation:
    """What a step of one position does to a query.

    Attributes
    ----------
    partner
        For each channel the other one of its pair; itself where it is not turned.
    pair
        For each channel the index of its angle; ``sign`` is -1 for the first channel of a pair, 0 where nothing turns.
    angles
        Radians per position, by pair, or who to ask for them.
    """

    partner: tuple[int, ...]
    pair: tuple[int, ...]
    sign: tuple[int, ...]
    angles: tuple[float, ...] | Angles

    def move(self, states: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        """Rotate ``[batch, heads, tokens, head_dim]`` as if each position were greater by ``distance``.

        ``distance`` is ``[batch or 1, tokens]`` long, and may be negative. Lengths are kept: an attention factor, which
        some scalings multiply into the angles' sines, is not applied once more.
        """
        if not any(self.sign):
            return states
        angles = self.angles() if isinstance(self.angles, Angles) else self.angles
        step, partner = _table(self.partner, self.pair, self.sign, angles, states.device)
        turned = distance[:, None, :, None].to(step.dtype) * step
        moved = states.float() * turned.cos().float() + states[..., partner].float() * turned.sin().float()
        return moved.to(states.dtype)


@dataclass(frozen=True)
class UnknownRotation:
    """That of a cache which was made from a config alone: its bytes can be planned, its sinks cannot be moved."""

    technique: str

    def move(self, states: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        """Nothing that could be right.

        Raises
        ------
        NotImplementedError
            Always.
        """
        raise NotImplementedError(
            f'positions="cache" of {self.technique!r} needs to know how the model turns its queries, and this cache '
            'was made from a config, which cannot tell. Fix: hfkv.make_cache(name, model), or positions="absolute"'
        )


@functools.lru_cache(maxsize=64)
def _table(
    partner: tuple[int, ...],
    pair: tuple[int, ...],
    sign: tuple[int, ...],
    angles: tuple[float, ...],
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    # distances are large: in float32 the product would lose what a model's own angles still have
    dtype = torch.float32 if device.type == "mps" else torch.float64
    steps = [sign[channel] * angles[pair[channel]] if sign[channel] else 0.0 for channel in range(len(partner))]
    return torch.tensor(steps, dtype=dtype, device=device), torch.tensor(partner, device=device)


def find_rotation(model: PreTrainedModel, layer_idx: int) -> Rotation:
    """The rotation of one layer's queries; the model is asked once.

    Raises
    ------
    NotImplementedError
        There is no rotary embedding, or none that can be understood by asking.
    """
    found = _asked.get(model)
    if not found:
        found = _asked[model] = _probe(model)
    rotation = found.get(layer_idx)
    if rotation is None:
        raise NotImplementedError(
            f"layer {layer_idx} of {type(model).__name__} does not turn its queries by a rotary embedding that hfkv "
            f'can follow, and positions="cache" moves the sinks by it. {_ABSOLUTE}'
        )
    return rotation


_asked: weakref.WeakKeyDictionary[PreTrainedModel, dict[int, Rotation]] = weakref.WeakKeyDictionary()


@torch.no_grad()
def _probe(model: PreTrainedModel) -> dict[int, Rotation]:
    """Run single tokens at several positions, watch the queries, and explain how they differ."""
    rotary = [module for module in model.modules() if "Rotary" in type(module).__name__]
    if not rotary or model.config.is_encoder_decoder:
        raise NotImplementedError(
            f'{type(model).__name__} has no rotary embedding in a decoder alone, and positions="cache" moves the sinks '
            f"by it. {_ABSOLUTE}"
        )
    integration.enable_fused_attention()
    queries: dict[int, torch.Tensor] = {}

    def note(module: Any, query: torch.Tensor) -> None:
        queries[module.layer_idx] = query.detach()

    calls: list[tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append((module, args, kwargs)), with_kwargs=True
        )
        for module in rotary
    ]
    training = model.training
    try:
        # dropout would make rows differ by more than their position
        model.eval()
        with attention.watch(note):
            _forward(model)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    sources = {
        (id(module), str(keywords)): (module, positions, keywords)
        for module, positions, keywords in map(_asked_with, calls)
    }
    result = {}
    for layer_idx, query in queries.items():
        fits = [(_misfit(rotation, query), rotation) for rotation in _candidates(sources.values(), query.shape[-1])]
        error, rotation = min(fits, key=lambda fit: fit[0])
        if error < _TOLERANCE:
            result[layer_idx] = rotation
    return result


def _forward(model: PreTrainedModel) -> None:
    embeddings: Any = model.get_input_embeddings()
    vocabulary = embeddings.weight.shape[0]
    tokens = torch.linspace(1, vocabulary - 1, _TOKENS, device=model.device).long()
    ids = tokens.repeat_interleave(len(_POSITIONS))[:, None]
    positions = torch.tensor(_POSITIONS, device=model.device).repeat(_TOKENS)[:, None]
    model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)


def _asked_with(call: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    """A rotary module's call: the positions, and what else it was told (a type of layer)."""
    module, args, keywords = call
    given = dict(inspect.signature(type(module).forward).bind(module, *args, **keywords).arguments)
    positions = given.pop("position_ids")
    # the module itself, and the states that tell it a dtype and a device, come first
    return module, positions, dict(list(given.items())[2:])


def _ask(module: Any, positions: torch.Tensor, keywords: dict[str, Any]) -> Any:
    """The module's own answer in float32, without an update of its state."""
    forward = inspect.unwrap(type(module).forward)
    return forward(module, torch.zeros(1, 1, 1, device=positions.device), position_ids=positions, **keywords)


def _angles_of(answer: Any, row: int) -> tuple[float, ...]:
    """Angles by pair, out of cosines and sines in either order (or complex numbers) whose first row is position 0."""
    if isinstance(answer, torch.Tensor):
        answer = (answer.real, answer.imag)
    cosines, sines = (part.flatten(0, -2).double() for part in answer)
    if bool((cosines[0] == 0).all()):
        cosines, sines = sines, cosines
    angles = torch.atan2(sines[row], cosines[row]).tolist()
    half = len(angles) // 2
    if angles[:half] == angles[half:]:
        angles = angles[:half]
    elif angles[::2] == angles[1::2]:
        angles = angles[::2]
    return tuple(angles)


def _candidates(sources: Iterable[tuple[Any, torch.Tensor, dict[str, Any]]], channels: int) -> Iterator[Rotation]:
    """Every rotation that these modules can mean: halves or neighbours, of all, the first or the last channels."""
    nothing = tuple(range(channels)), (0,) * channels, (0,) * channels
    yield Rotation(*nothing, angles=())
    for module, positions, keywords in sources:
        angles = _angles_of(_ask(module, positions, keywords), 1)
        count = len(angles)
        kind = getattr(module, "rope_type", "default")
        kind = kind.get(keywords.get("layer_type")) if isinstance(kind, dict) else kind
        asked = Angles(module, keywords) if kind == "longrope" or "dynamic" in str(kind) else angles
        for start in {0, channels - 2 * count} if 2 * count <= channels else ():
            for pairs in (
                [(start + index, start + index + count) for index in range(count)],
                [(start + 2 * index, start + 2 * index + 1) for index in range(count)],
            ):
                partner, pair, sign = (list(part) for part in nothing)
                for index, (first, second) in enumerate(pairs):
                    partner[first], partner[second] = second, first
                    pair[first] = pair[second] = index
                    sign[first], sign[second] = -1, 1
                yield Rotation(tuple(partner), tuple(pair), tuple(sign), asked)


def _misfit(rotation: Rotation, query: torch.Tensor) -> float:
    """How far the queries of a token at later positions are from its moved query at position 0."""
    by_position = query.float().unflatten(0, (_TOKENS, len(_POSITIONS)))
    errors = []
    for index, position in enumerate(_POSITIONS):
        moved = rotation.move(by_position[:, 0], torch.tensor([[position]], device=query.device))
        errors.append((moved - by_position[:, index]).norm() / by_position[:, 0].norm())
    return float(max(errors))
