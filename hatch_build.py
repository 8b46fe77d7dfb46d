"""Give the distribution one extra for every plugin folder, so that a new technique touches no file but its own."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class PluginExtras(MetadataHookInterface):
    """``pip install 'hfkv[kivi]'`` for ``plugins/hfkv-kivi``; siblings are pinned to the series of the core."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the extras: those of pyproject.toml, and the plugins that lie beside it."""
        extras = dict(self.config.get("extras", {}))
        for pyproject in sorted(Path(self.root, "plugins").glob("*/pyproject.toml")):
            name = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["name"]
            extras[name.removeprefix("hfkv-")] = [f"{name}~={metadata['version']}"]
        metadata["optional-dependencies"] = extras
