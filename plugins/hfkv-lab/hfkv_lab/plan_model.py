"""What a plan needs to know of a model: its cache layers and its parameters, from a config and without its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig, PretrainedConfig

from hfkv.cli import models, packaged
from hfkv.defaults import KEY
from hfkv.integration import cache_argument

# without one of these transformers takes its default of the architecture, and the plan would be of another model
NEEDED = {"num_hidden_layers": "--layers", "hidden_size": "--hidden-size", "num_attention_heads": "--heads"}


@dataclass(frozen=True)
class Parameters:
    """How many numbers the weights are.

    Attributes
    ----------
    matrices
        In the matrices of the layers: what weight quantization shrinks.
    rest
        In embeddings, norms and the output layer, which stay in 16 bits.
    active
        Multiplied for each token: all but the embeddings and the experts that are not chosen.
    experts
        In experts, of which each token takes the share ``chosen``.
    """

    matrices: int
    rest: int
    active: int
    experts: int = 0
    chosen: float = 1.0

    @property
    def total(self) -> int:
        """All of them."""
        return self.matrices + self.rest


@dataclass(frozen=True)
class LayerShape:
    """A layer's keys and values of one token."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        """Numbers that a token takes."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class PlanModel:
    """A model, as a plan sees it.

    Attributes
    ----------
    config
        The decoder's config: what caches are built from.
    heads
        Query heads of a layer.
    shapes
        One for each layer.
    """

    name: str
    config: PretrainedConfig
    parameters: Parameters
    heads: int
    shapes: tuple[LayerShape, ...]

    @property
    def limit(self) -> int | None:
        """The longest context that the model takes."""
        return getattr(self.config, "max_position_embeddings", None)


def from_name(name: str, overrides: Mapping[str, Any] | None = None) -> PlanModel:
    """The model of a Hub id, a folder or a package; only its config is read.

    Parameters
    ----------
    overrides
        Fields of the config by name, and ``"params"``.

    Raises
    ------
    ValueError
        The config lacks a field that the plan needs.
    OSError
        No such model.
    """
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    source = models.find(name)
    path = Path(source.path)
    if source.packaged is not None:
        path = packaged.converted(source.packaged)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} has no config.json. Fix: name the folder that from_pretrained takes")
        _check(json.loads((path / "config.json").read_text(encoding="utf-8")), given, str(path / "config.json"))
        config = AutoConfig.from_pretrained(path)
    else:
        raw, _ = PretrainedConfig.get_config_dict(source.path, local_files_only=not source.online)
        _check(raw, given, f"the config of {name}")
        config = AutoConfig.from_pretrained(source.path, local_files_only=not source.online)
    return from_config(config, source.name, given)


def from_config(config: PretrainedConfig, name: str = "", overrides: Mapping[str, Any] | None = None) -> PlanModel:
    """The model of a config; parameters are counted on the meta device, where they take no memory."""
    given = dict(overrides or {})
    params = given.pop("params", None)
    decoder = config.get_text_config(decoder=True)
    for key, value in given.items():
        setattr(decoder, key, value)
    parameters = _count(config) if params is None else Parameters(int(params), 0, int(params))
    return _model(name or type(config).__name__, decoder, parameters)


def from_numbers(
    *,
    num_hidden_layers: int | None = None,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    params: float | None = None,
    num_attention_heads: int | None = None,
    hidden_size: int | None = None,
) -> PlanModel:
    """A model that has no config: the numbers that a plan needs.

    Raises
    ------
    ValueError
        One of the first four is missing.
    """
    needed = {
        "--layers": num_hidden_layers,
        "--kv-heads": num_key_value_heads,
        "--head-dim": head_dim,
        "--params": params,
    }
    missing = [option for option, value in needed.items() if value is None]
    if missing:
        raise ValueError(
            f"a plan without MODEL needs {', '.join(needed)}; missing: {', '.join(missing)}. "
            "Fix: add it, or name a model"
        )
    heads = num_attention_heads or num_key_value_heads
    config = LlamaConfig(
        num_hidden_layers=num_hidden_layers,
        num_key_value_heads=num_key_value_heads,
        num_attention_heads=heads,
        head_dim=head_dim,
        hidden_size=hidden_size or heads * head_dim,  # type: ignore[operator]
        max_position_embeddings=2**31,
    )
    total = int(params)  # type: ignore[arg-type]
    name = f"{num_hidden_layers} layers, {num_key_value_heads} KV heads of {head_dim}, {total / 1e9:.3g}e9 parameters"
    return _model(name, config, Parameters(total, 0, total))


def _check(raw: Mapping[str, Any], given: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for a field that the JSON lacks and that an architecture's default would stand in for."""
    if "model_type" not in raw:
        raise ValueError(
            f"{where} has no model_type. Fix: add it, or plan with --layers, --kv-heads, --head-dim, --params"
        )
    inner = raw.get("text_config")
    text = {**raw, **inner} if isinstance(inner, Mapping) else raw
    names = type(AutoConfig.for_model(text["model_type"])).attribute_map
    for field, option in NEEDED.items():
        spelled = names.get(field, field)
        if field not in given and text.get(field) is None and text.get(spelled) is None:
            raise ValueError(f"{where} has no {spelled}. Fix: add it, or say it with {option}")


def _model(name: str, config: PretrainedConfig, parameters: Parameters) -> PlanModel:
    for field, option in NEEDED.items():
        if getattr(config, field, None) is None:
            raise ValueError(f"{type(config).__name__} has no {field}. Fix: say it with {option}")
    return PlanModel(name, config, parameters, config.num_attention_heads, layer_shapes(config))


def layer_shapes(config: PretrainedConfig) -> tuple[LayerShape, ...]:
    """What each layer stores of a token; no heads for one that stores nothing."""
    if getattr(config, KEY, None):
        return _stored_shapes(config)
    # heterogeneous models have a config for each layer
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    return tuple(map(_shape, layers))


def _stored_shapes(config: PretrainedConfig) -> tuple[LayerShape, ...]:
    """What a model stores that a plugin's structure has changed: it is run on a token, on the meta device."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config).eval()
        token = torch.zeros((1, 1), dtype=torch.long)
    cache: Any = DynamicCache(config=config)
    with torch.no_grad():
        model(token, **{cache_argument(model): cache, "use_cache": True})
    shapes = [LayerShape(0, 0, 0)] * config.num_hidden_layers
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is not None and values is not None and keys.numel():
            shapes[index] = LayerShape(keys.shape[1], keys.shape[3], values.shape[3])
    return tuple(shapes)


def _shape(config: PretrainedConfig) -> LayerShape:
    def read(field: str) -> Any:
        return getattr(config, field, None)

    if read("kv_lora_rank"):
        # multi-head latent attention: one latent as the keys, the rotated part of the key as the values
        return LayerShape(1, config.kv_lora_rank, config.qk_rope_head_dim)
    kv_heads = read("num_key_value_heads") or config.num_attention_heads
    head_dim = read("head_dim") or config.hidden_size // config.num_attention_heads
    return LayerShape(kv_heads, head_dim, read("v_head_dim") or head_dim)


def _count(config: PretrainedConfig) -> Parameters:
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ValueError(f"{error}\nFix: say how many parameters there are with --params") from error
    embeddings = {id(model.get_input_embeddings().weight)}
    head = model.get_output_embeddings()
    outside = embeddings | ({id(head.weight)} if head is not None else set())
    chosen = _chosen(config.get_text_config(decoder=True))
    matrices = rest = multiplied = experts = 0
    for name, parameter in model.named_parameters():
        size = parameter.numel()
        if parameter.dim() > 1 and id(parameter) not in outside:
            matrices += size
        else:
            rest += size
        if ".experts." in name and chosen < 1:
            experts += size
        elif id(parameter) not in embeddings:
            multiplied += size
    if head is not None and id(head.weight) in embeddings:
        # tied: stored once, and multiplied as the output layer
        multiplied += head.weight.numel()
    return Parameters(matrices, rest, round(multiplied + experts * chosen), experts, chosen)


def _chosen(config: PretrainedConfig) -> float:
    """The share of the experts that each token takes; 1 for a model without any."""
    picked = getattr(config, "num_experts_per_tok", None)
    counts = [getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")]
    return next((picked / count for count in counts if count and picked), 1.0)
