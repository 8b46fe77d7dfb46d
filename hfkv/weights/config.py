"""The config of quantized weights, as transformers reads and saves it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from .. import registry
from ..specs import WeightQuantizerSpec

# what transformers calls us in a saved config.json
METHOD = "hfkv"
# in `layers`: what it names stays as it is
KEEP = "skip"
# of the saved tensors: raised when older ones can no longer be read as they are
FORMAT = 1


class WeightConfig(QuantizationConfigMixin):
    """How the weights of a model are quantized.

    Pass it to ``from_pretrained(..., quantization_config=...)`` or to `hfkv.quantize_weights`; a saved model has it in
    its ``config.json``, so that loading again needs none.

    Parameters
    ----------
    backend
        The name of a registered weight quantizer, e.g. ``"rtn"``.
    skip
        Modules that stay as they are: a module's name, its last part, or the module that holds it. None leaves out the
        output head, what is tied to the embeddings and what the model keeps in float32; a list is all that is left
        out. A tied head that is not left out is split: it gets its own quantized weight, the embeddings stay.
    layers
        Other options for some modules, e.g. ``{"0": {"nbits": 8}, "1-3": "skip", "down_proj": {"backend": "hqq"}}``:
        a layer's number (``"-1"`` the last), a range, or a module as in ``skip``; later entries win.
    **options
        The backend's options.

    Raises
    ------
    ValueError
        Unknown backend or option, or a value that is not allowed.
    ImportError
        The backend's requirements are not installed.
    """

    quant_method = METHOD  # type: ignore[assignment]

    def __init__(
        self,
        backend: str,
        *,
        skip: Sequence[str] | None = None,
        layers: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        method, version = options.pop("quant_method", METHOD), options.pop("format", FORMAT)
        if method != METHOD:
            raise ValueError(f"quant_method={method!r} is not {METHOD!r}: this is another library's config")
        if version != FORMAT:
            raise ValueError(f"the weights were saved in format {version!r}, this hfkv reads {FORMAT}: upgrade hfkv")
        if skip is not None and (isinstance(skip, str) or not all(isinstance(name, str) for name in skip)):
            raise ValueError(f"skip={skip!r} must be a list of module names, such as ['lm_head']")
        self.backend = backend
        self.skip = None if skip is None else list(skip)
        layer_options = backend_class(backend).Options
        self.options: dict[str, Any] = layer_options.parse(options, backend).given()
        self._transient: list[str] = layer_options.transient()
        self.layers = _checked_layers(layers or {}, backend, self.options)

    def choose(self, override: Mapping[str, Any] | None) -> tuple[type, Any]:
        """The layer class and its options, for modules under an entry of ``layers`` or under none."""
        return _choose(self.backend, self.options, override or {}, "layers")

    def to_dict(self) -> dict[str, Any]:
        """What is saved."""
        saved = {name: value for name, value in self.options.items() if name not in self._transient}
        return {
            "quant_method": METHOD,
            "format": FORMAT,
            "backend": self.backend,
            "skip": copy.copy(self.skip),
            "layers": copy.deepcopy(self.layers),
            **copy.deepcopy(saved),
        }

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.to_dict().items()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeightConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]


def backend_class(name: str, named_in: str = "backend") -> Any:
    """The layer class that a backend's name stands for; errors as `registry.find`."""
    return registry.find(WeightQuantizerSpec, name, named_in)


def _choose(backend: str, options: Mapping[str, Any], override: Mapping[str, Any], named_in: str) -> tuple[type, Any]:
    own = dict(override)
    other = own.pop("backend", backend)
    layer_class = backend_class(other, f"{named_in} backend")
    # another backend has other options: it starts from its own defaults
    base = options if other == backend else {}
    return layer_class, layer_class.Options.parse({**base, **own}, other, named_in)


def _checked_layers(layers: Mapping[str, Any], backend: str, options: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(layers, Mapping):
        raise ValueError(f"layers={layers!r} must be a dict such as {{'0': {{'nbits': 8}}, '1-3': 'skip'}}")
    for key, override in layers.items():
        if override == KEEP:
            continue
        if not isinstance(override, Mapping):
            raise ValueError(f"layers[{key!r}]={override!r} must be a dict of options or {KEEP!r}")
        layer_class, _ = _choose(backend, options, override, f"layers[{key!r}]")
        refused = [name for name in layer_class.Options.transient() if name in override]  # type: ignore[attr-defined]
        if refused:
            raise ValueError(f"layers[{key!r}] has {refused[0]!r}, which is of the whole model: pass it beside layers")
    return {str(key): copy.deepcopy(override) for key, override in layers.items()}
