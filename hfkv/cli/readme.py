"""The parts of README.md that are made from the code: ``python -m hfkv.cli.readme --write`` in a clone.

Without ``--write`` it prints what the README should be. The plugins' table comes from their folders, installed or not;
the example is run, on the packaged weights of the model that it names.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from ..registry import PluginManager
from .inventory import KINDS
from .packaged import PACKAGED, PackagedModel, converted

ROOT = Path(__file__).resolve().parents[2]
# what stands between these is generated
TABLE = re.compile(r"(?<=<!-- plugins: python -m hfkv\.cli\.readme --write -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)
EXAMPLE = re.compile(r"```python\n(?P<code>.*?)```\n\n```text\n(?P<output>.*?)```", re.DOTALL)


def plugins(root: Path = ROOT) -> str:
    """The table of the plugins in a clone: how to install each, what it brings, what it is."""
    rows = ["| install | brings | what it is |", "| --- | --- | --- |"]
    for pyproject in sorted(root.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        name = project["name"].removeprefix("hfkv-")
        brings = ", ".join(_brings(name, pyproject.parent / f"hfkv_{name}" / "plugin.py"))
        rows.append(f"| [`hfkv[{name}]`](plugins/{pyproject.parent.name}) | {brings} | {project['description']} |")
    return "\n".join(rows)


def _brings(name: str, source: Path) -> list[str]:
    """What a plugin module yields, in words. It imports nothing heavy, so it runs where it lies."""
    spec = importlib.util.spec_from_file_location(f"_hfkv_readme_{name}", source)
    if spec is None or spec.loader is None:
        raise ValueError(f"{source} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plugin = PluginManager().register(module, name)
    if plugin.error is not None:
        raise ValueError(f"{source}: {plugin.error}")
    return [f"{KINDS[type(record)]} `{record.name}`" for record in plugin.specs]


def example(text: str) -> tuple[str, str]:
    """The Python of a README and the output that it shows."""
    match = EXAMPLE.search(text)
    if match is None:
        raise ValueError("no Python block with a text block below it")
    return match["code"], match["output"]


def run(code: str) -> str:
    """What the code prints, in a process of its own, with the packaged model where the Hub would have put it."""
    with tempfile.TemporaryDirectory() as hub:
        for packaged in PACKAGED:
            if packaged.hub in code:
                _put_into_hub_cache(packaged, Path(hub))
        variables = os.environ | {"HF_HUB_CACHE": hub, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(f"the example failed:\n{done.stderr}")
    return done.stdout


def _put_into_hub_cache(packaged: PackagedModel, hub: Path) -> None:
    repository = hub / f"models--{packaged.hub.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("packaged", encoding="utf-8")
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / "packaged").symlink_to(converted(packaged), target_is_directory=True)


def updated(text: str) -> str:
    """A README with its generated parts made anew."""
    code, _ = example(text)
    text = EXAMPLE.sub(lambda match: f"```python\n{code}```\n\n```text\n{run(code)}```", text, count=1)
    return TABLE.sub(lambda match: plugins(), text)


def main() -> None:
    """Print the README, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write README.md instead of printing it")
    readme = ROOT / "README.md"
    text = updated(readme.read_text(encoding="utf-8"))
    if parser.parse_args().write:
        readme.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
