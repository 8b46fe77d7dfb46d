"""The frozen records that hooks yield: names and where to find the code, never the code itself."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What every technique tells about itself.

    Parameters
    ----------
    name
        What a user writes, e.g. ``cache_implementation="kivi"``. Lower case, unique for its kind.
    summary
        One line for ``hfkv list`` and the generated tables.
    load
        ``"module:attribute"``, imported when the technique is first used.
    requires
        PEP 508 requirements, checked against installed metadata before anything is imported.
    """

    name: str
    summary: str
    load: str
    requires: tuple[str, ...] = ()

    def resolve(self) -> Any:
        """Import the module and return the attribute that ``load`` names."""
        return load(self.load)


def load(place: str) -> Any:
    """Import the module of ``"module:attribute"`` and return the attribute."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True, kw_only=True)
class CacheSpec(Spec):
    """A `Cache` technique; ``load`` names a subclass of `hfkv.cache.KVLayer`.

    The flags say what the technique can do. The conformance kit tests both answers: a ``True`` must work, a
    ``False`` must raise NotImplementedError.

    Parameters
    ----------
    crop
        Tokens can be taken back (`crop`): assisted decoding and prompt lookup need it.
    reorder
        Rows can change places (`reorder_cache`): beam search needs it.
    select
        Rows can be repeated and left out (`batch_repeat_interleave`, `batch_select_indices`).
    offload
        What is stored can move to the CPU and back (`offload`, `prefetch`).
    lossless
        What comes out is what went in.
    contract_options
        Options that the conformance kit builds the cache with, so that its 24 to 40 tokens exercise the technique
        (small blocks, a short residual) and errors stay small (8 bits).
    contract_model_options
        Further ones, by ``config.model_type``, for a model that the technique needs another setting for.
    contract_tolerance
        What a lossy cache may cost under these options: the error of the logits, where 1 is the least that losing one
        cached token costs. Less than 1, or the bound would prove nothing. A technique that forgets tokens by design is
        compared with a model that sees what `KVLayer.attended` says; None, where it cannot say: the kit then compares
        it only with itself.
    contract_reference
        For a technique that changes what the model computes: ``"module:attribute"`` of a function
        ``(model, options) -> transformers.Cache`` whose cache is right for one forward of a whole sequence, and as
        simple as can be. The kit takes the model with such a cache, new for each forward, for the plain model.
    """

    crop: bool = True
    reorder: bool = True
    select: bool = True
    offload: bool = True
    lossless: bool = False
    contract_options: Mapping[str, Any] = field(default_factory=dict)
    contract_model_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    contract_tolerance: float | None = 0.5
    contract_reference: str | None = None


@dataclass(frozen=True, kw_only=True)
class KVQuantizerSpec(Spec):
    """A rule that decides codes, scale and offset; ``load`` names a subclass of `hfkv.cache.KVQuantizer`.

    Parameters
    ----------
    nbits
        The widths that it can produce, out of 2, 3, 4 and 8.
    axis_names
        How transformers spells the axes for the backend of this name (``{0: "token", -1: "channel"}``).
    """

    nbits: tuple[int, ...] = (2, 3, 4, 8)
    axis_names: Mapping[int, str] = field(default_factory=lambda: {0: "token", -1: "channel"})


@dataclass(frozen=True, kw_only=True)
class KernelSpec(Spec):
    """Kernels for the op table; ``load`` names an object with the methods of `hfkv.kernels.Kernels`.

    Parameters
    ----------
    priority
        Orders the candidates of one device, highest first; the reference has 0.
    """

    priority: int = 10


@dataclass(frozen=True, kw_only=True)
class WeightQuantizerSpec(Spec):
    """A weight-quantization backend; ``load`` names a subclass of `hfkv.weights.QuantizedLinear`.

    Parameters
    ----------
    contract_options
        Every setting that the contracts are run with: each width and each kind of grid once.
    """

    contract_options: tuple[Mapping[str, Any], ...] = (MappingProxyType({}),)


@dataclass(frozen=True, kw_only=True)
class AssistantSpec(Spec):
    """A speculative assistant; ``load`` names a subclass of `hfkv.speculation.Drafter`.

    Parameters
    ----------
    contract_options
        Options that the conformance kit builds the assistant with, so that it drafts on tiny random models; or
        ``"module:attribute"`` of a function that is given such a model and returns them.
    """

    contract_options: Mapping[str, Any] | str = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainerSpec(Spec):
    """A distillation trainer; ``load`` names the trainer class, whose ``config_class`` has its options."""


@dataclass(frozen=True, kw_only=True)
class StructureSpec(Spec):
    """A change of a model's modules; ``load`` names a function ``(model, **settings)`` that makes it.

    A model that was changed says so in its config, ``config.hfkv = {name: settings}``, which `save_pretrained` keeps.
    The function runs at the end of the model's ``__init__``, before weights are loaded, and once more for each model
    around it: it finds what it has changed as it left it.

    Parameters
    ----------
    change
        ``"module:attribute"`` of a function ``(model, ...) -> model`` that makes the change for the first time: it
        checks what is asked, changes a model with its weights, and writes the config. By it others can ask for a
        structure by name.
    """

    change: str

    def resolve_change(self) -> Any:
        """Import the module and return the function that ``change`` names."""
        return load(self.change)


@dataclass(frozen=True, kw_only=True)
class SubcommandSpec(Spec):
    """A subcommand of ``hfkv``; ``load`` names a function that typer can turn into a command."""
