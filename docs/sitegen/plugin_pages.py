"""One page for each installed plugin: its README, and what the registry knows of it.

A new plugin needs nothing here: whatever distribution is installed and found through the entry point has a page.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

import hfkv
from hfkv import registry, specs
from hfkv.cache import CacheOptions, KVLayer
from hfkv.registry import Plugin

from . import docstrings, figures
from .tables import code, options, own_options, table

ROOT = Path(__file__).resolve().parents[2]
# what each kind of record is called on the pages
KINDS: dict[type[specs.Spec], str] = {
    specs.CacheSpec: "cache",
    specs.KVQuantizerSpec: "KV quantizer",
    specs.WeightQuantizerSpec: "weight quantizer",
    specs.KernelSpec: "kernels",
    specs.AssistantSpec: "assistant",
    specs.TrainerSpec: "trainer",
    specs.StructureSpec: "structure",
    specs.SubcommandSpec: "subcommand",
}
# tokens at which the stored size is shown
LENGTHS = (1024, 4096, 32768)


def pages() -> dict[str, str]:
    """The Markdown of every plugin's page, by its path in the site."""
    return {path(plugin): page(plugin) for plugin in hfkv.plugins()}


def path(plugin: Plugin) -> str:
    """Where a plugin's page is in the site."""
    return f"plugins/{plugin.name}.md"


def missing() -> list[str]:
    """What would be left out of the site: plugins of this repository that are not installed, or broken."""
    found = {plugin.distribution: plugin for plugin in hfkv.plugins()}
    problems = [f"{name}: {plugin.error}" for name, plugin in found.items() if plugin.error is not None]
    folders = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
    return problems + [f"{name}: not installed" for name in folders if name not in found]


def index() -> str:
    """The table of all plugins."""
    rows = []
    for plugin in hfkv.plugins():
        provides = [f"{KINDS[type(spec)]} {code(spec.name)}: {spec.summary}" for spec in plugin.specs]
        rows.append((f"[{plugin.name}](/plugins/{plugin.name}.md)", "<br>".join(provides), code(install(plugin))))
    return table(("Plugin", "What it adds", "Install"), rows)


def caches() -> str:
    """The table of all caches."""
    rows = [
        (f"[{code(spec.name)}](/plugins/{registry.manager().owner(spec)}.md)", spec.summary)
        for spec in registry.manager().specs(specs.CacheSpec).values()
    ]
    return table(("`cache_implementation`", "What it does"), rows)


def assistants() -> str:
    """The table of all assistants."""
    rows = [
        (f"[{code(spec.name)}](/plugins/{registry.manager().owner(spec)}.md)", spec.summary)
        for spec in registry.manager().specs(specs.AssistantSpec).values()
    ]
    return table(("Assistant", "How it drafts"), rows)


def backends() -> str:
    """The table of all KV quantizers."""
    rows = [
        (
            f"[{code(spec.name)}](/plugins/{registry.manager().owner(spec)}.md)",
            ", ".join(map(str, spec.nbits)),
            spec.summary,
        )
        for spec in registry.manager().specs(specs.KVQuantizerSpec).values()
    ]
    return table(("`backend`", "Bits", "What it does"), rows)


def install(plugin: Plugin) -> str:
    """The command that installs a plugin; those of this repository are extras of the core."""
    if plugin.distribution is None:
        return "part of this process"
    ours = (ROOT / "plugins" / plugin.distribution).is_dir()
    extra = plugin.distribution.removeprefix("hfkv-")
    return f"pip install 'hfkv[{extra}]'" if ours else f"pip install {plugin.distribution}"


def page(plugin: Plugin) -> str:
    """The README of a plugin, then a section for each record that it yields, then its figures."""
    parts = [_readme(plugin)]
    if plugin.error is not None:
        parts.append(f"This plugin could not be loaded: {plugin.error}")
    for spec in plugin.specs:
        parts.append(f"## The {KINDS[type(spec)]} `{spec.name}`")
        if isinstance(spec, specs.CacheSpec):
            parts += [_method(spec), _cache(spec)]
        elif isinstance(spec, specs.KVQuantizerSpec):
            parts += [_method(spec), _quantizer(spec)]
        elif isinstance(spec, specs.AssistantSpec):
            parts += [_method(spec), "### Options", options(spec.resolve().Options)]
        elif isinstance(spec, specs.TrainerSpec):
            parts += [_method(spec), "### Options", own_options(spec.resolve().config_class)]
        else:
            parts.append(f"{spec.summary[:1].upper()}{spec.summary[1:]}.")
        if spec.requires:
            parts.append("Needs " + ", ".join(map(code, spec.requires)) + ".")
    measured = figures.about(plugin.name, top="../")
    if measured:
        parts += ["## Measured", measured]
    return "\n\n".join(filter(None, parts)) + "\n"


def _readme(plugin: Plugin) -> str:
    if plugin.distribution is None:
        return f"# {plugin.name}"
    ours = ROOT / "plugins" / plugin.distribution / "README.md"
    if ours.is_file():
        return ours.read_text(encoding="utf-8").strip()
    description = importlib.metadata.metadata(plugin.distribution).json.get("description")
    return str(description or f"# {plugin.distribution}").strip()


def _method(spec: specs.Spec) -> str:
    """The docstring of the module that a record loads: the method and where it comes from."""
    return docstrings.markdown(docstrings.of_module(spec.load.partition(":")[0])) or spec.summary


def _cache(spec: specs.CacheSpec) -> str:
    layer: type[KVLayer] = spec.resolve()
    parts = ["### Options", options(layer.Options)]
    parts.append("[`layers`](/caches.md#per-layer-settings) sets any of them for single layers.")
    if layer.Options.translate.__func__ is not CacheOptions.translate.__func__:  # type: ignore[attr-defined]
        parts += ["### Other spellings", docstrings.markdown(layer.Options.translate.__doc__ or "")]
    parts += ["### Stored size", stored_size(spec.name, layer.Options)]
    parts += ["### What it can do", _capabilities(spec)]
    return "\n\n".join(parts)


def _capabilities(spec: specs.CacheSpec) -> str:
    meanings = docstrings.entries(specs.CacheSpec.__doc__, "Parameters")
    answers = [
        (code(name), "yes" if getattr(spec, name) else "no", meaning)
        for name, meaning in meanings.items()
        if isinstance(getattr(spec, name), bool)
    ]
    return table(("Capability", "Answer", "Meaning"), answers)


def _quantizer(spec: specs.KVQuantizerSpec) -> str:
    widths = ", ".join(map(str, spec.nbits))
    axes = ", ".join(f"`{number}` for per {name}" for number, name in spec.axis_names.items())
    return f"Bits: {widths}. In `axis_key` and `axis_value`, transformers' spelling of the axes: {axes}."


def stored_size(name: str, options_class: type[CacheOptions]) -> str:
    """Bits per element of a cache at some lengths, measured with `hfkv.memory`."""
    settings: list[dict[str, Any]] = [{}]
    if "nbits" in {field.name for field in dataclasses.fields(options_class)}:
        settings = [{"nbits": nbits} for nbits in (2, 3, 4, 8)]
    rows = []
    for setting in settings:
        label = ", ".join(f"{key}={value}" for key, value in setting.items()) or "default options"
        rows.append((code(label), *(f"{bits_per_element(name, length, setting):.2f}" for length in LENGTHS)))
    head = ("Options", *(f"{length:,} tokens" for length in LENGTHS))
    return f"{table(head, rows)}\n\n{_SIZE_NOTE}"


_SIZE_NOTE = (
    "Bits per element that are stored, everything counted ([how](/how-it-works.md#bytes)), head_dim 128, a bfloat16 "
    "model: its plain cache has 16."
)


def bits_per_element(name: str, tokens: int, setting: dict[str, Any]) -> float:
    """Stored bits per element after a prompt of that many tokens, bfloat16, head_dim 128."""
    config = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=128,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=tokens,
    )
    cache = hfkv.make_cache(name, config, **setting)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 1, tokens, 128, generator=generator).bfloat16()
    cache.update(states, states.clone(), 0)
    return hfkv.memory(cache).bits_per_element
