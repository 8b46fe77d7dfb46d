"""What mkdocs calls while it builds the site: adds the plugins' pages and expands the generated parts of the others.

A page says where a generated part goes with a comment on a line of its own, ``<!-- generated: NAME ARGUMENTS -->``;
`GENERATED` has the names. Nothing that is generated is written into the repository.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from sitegen import figures, plugin_pages, tables

import hfkv

GENERATED: dict[str, Callable[..., str]] = {
    "assistants": plugin_pages.assistants,
    "backends": plugin_pages.backends,
    "caches": plugin_pages.caches,
    "contracts": tables.contracts,
    "figures": figures.every,
    "figures-of": figures.about,
    "folder": tables.folder,
    "hooks": tables.hook_reference,
    "ops": tables.op_table,
    "plugins": plugin_pages.index,
    "studies": figures.studies,
}
_PLACE = re.compile(r"^<!-- generated: ([\w-]+)((?: [\w./-]+)*) -->$", re.MULTILINE)

_logger = logging.getLogger("mkdocs.hooks.hfkv")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give every plugin its entry in the navigation."""
    # a warning fails a strict build: a site without one of our plugins is not what was meant
    for problem in plugin_pages.missing():
        _logger.warning("no page for %s", problem)
    for entry in config.nav or ():
        if isinstance(entry, dict) and "Plugins" in entry:
            entry["Plugins"].extend(plugin_pages.path(plugin) for plugin in hfkv.plugins())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of every plugin."""
    for path, content in plugin_pages.pages().items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Expand the generated parts of a page."""
    return _PLACE.sub(lambda match: GENERATED[match[1]](*match[2].split()), markdown)
