"""What the pages say is what the code does: names, patches, variables, options, sizes."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

import hfkv
import hfkv.cache
import hfkv.heads
import hfkv.speculation
from hfkv import registry
from hfkv.registry import PluginManager

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
sys.path.append(str(DOCS))

from sitegen import docstrings, figures, plugin_pages, tables  # noqa: E402

PAGES = {page.relative_to(DOCS).as_posix(): page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")}


def documented(page: str) -> set[str]:
    return set(re.findall(r"^::: (\S+)$", PAGES[page], re.MULTILINE))


def test_every_public_name_is_documented():
    assert {f"hfkv.{name}" for name in hfkv._HOME} <= documented("api.md")
    parts = {
        f"{package.__name__}.{name}"
        for package in (hfkv.cache, hfkv.heads, hfkv.speculation)
        for name in package.__all__
    }
    assert parts <= documented("api.md") | documented("api-for-authors.md")


@pytest.mark.parametrize("name", sorted(documented("api.md") | documented("api-for-authors.md")))
def test_documented_name_says_what_it_is(name):
    module, _, attribute = name.rpartition(".")
    assert docstrings.summary(getattr(sys.modules.get(module) or __import__(module, fromlist=["_"]), attribute).__doc__)


def test_patches_are_those_of_the_page():
    # in a process of its own: what other tests have patched or restored must not matter
    script = """
        import hfkv
        from hfkv import patching
        from hfkv.testing.models import load
        hfkv.make_cache("window", load("deepseek_v3", "sdpa").model, window_length=8)
        print(*sorted(name for _, name in patching._patches))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, timeout=300
    )
    section = PAGES["how-it-works.md"].partition("## What is patched")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == done.stdout.split()


def test_every_variable_is_documented():
    read = set()
    for source in (ROOT / "hfkv").rglob("*.py"):
        read |= set(re.findall(r"\bHFKV_[A-Z_]+\b", source.read_text(encoding="utf-8")))
    assert read
    assert read == set(re.findall(r"^\| `(HFKV_[A-Z_]+)` \|", PAGES["environment.md"], re.MULTILINE))


@pytest.mark.parametrize(
    "command", sorted({m for text in PAGES.values() for m in re.findall(r"`hfkv ([a-z][^`]*)`", text)})
)
def test_commands_exist(command):
    # `hfkv list --kernels`: the subcommand and each option are in its help
    subcommand, *options = command.split()
    done = subprocess.run(
        [sys.executable, "-m", "hfkv.cli", subcommand, "--help"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert all(option in done.stdout for option in options if option.startswith("--"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepOptions(hfkv.cache.CacheOptions):
    """Options of the cache that a plugin of this test adds."""

    share: int = hfkv.cache.option(3, "tokens kept | of ten")

    @classmethod
    def translate(cls, given):
        """Take ``part`` for ``share``."""
        return {("share" if key == "part" else key): value for key, value in given.items()}


class KeepLayer(hfkv.cache.SegmentedLayer):
    Options = KeepOptions

    def __init__(self, options, context):
        super().__init__(options, context, sink_length=0, residual_length=64, block_length=32)

    def make_quantizer(self):
        return registry.find(hfkv.KVQuantizerSpec, "rtn", "backend")()

    def key_format(self, head_dim):
        return hfkv.cache.PackedFormat(8, "channel", 32, head_dim)

    value_format = key_format


class KeepPlugin:
    @hfkv.hookimpl
    def hfkv_caches(self):
        yield hfkv.CacheSpec(name="keep", summary="a third of it", load=f"{__name__}:KeepLayer", crop=False)

    @hfkv.hookimpl
    def hfkv_kernels(self):
        yield hfkv.KernelSpec(name="soon", summary="not here yet", load="nowhere:x", requires=("not-a-distribution",))


@pytest.fixture
def with_keep(monkeypatch):
    """A manager of its own that has one plugin more."""
    manager = PluginManager()
    manager.discover()
    assert manager.register(KeepPlugin(), "keep").error is None
    monkeypatch.setattr(registry, "manager", lambda: manager)


def test_new_plugin_needs_no_edit(with_keep):
    page = plugin_pages.pages()["plugins/keep.md"]
    assert "| `share` | `3` | tokens kept \\| of ten |" in page
    assert "Take ``part`` for ``share``." in page
    assert "| `crop` | no |" in page
    # 8 bits and 32 / 32 for scale and offset in 4,032 tokens, 16 in the other 64 and the room for 32
    assert re.search(r"\| `default options` \| \S+ \| 9\.23 \|", page)
    assert "Not here yet.\n\nNeeds `not-a-distribution`." in page
    assert "(/plugins/keep.md)" in plugin_pages.index()
    assert "| [`keep`](/plugins/keep.md) | a third of it |" in plugin_pages.caches()


def test_plugin_of_another_repository_has_its_readme():
    page = plugin_pages.page(registry.Plugin("other", "packaging", "1.0", "ValueError: no", ()))
    assert "Reusable core utilities" in page
    assert "This plugin could not be loaded: ValueError: no" in page


def test_every_option_of_an_installed_cache_is_shown():
    specs = registry.manager().specs(hfkv.CacheSpec)
    assert specs
    for spec in specs.values():
        page = plugin_pages.pages()[f"plugins/{registry.manager().owner(spec)}.md"]
        for field in dataclasses.fields(spec.resolve().Options):
            assert field.metadata["help"], field.name
            assert f"| `{field.name}` | `{field.default!r}` | {field.metadata['help']} |" in page


def test_options_of_a_trainer_are_those_that_it_adds():
    specs = registry.manager().specs(hfkv.TrainerSpec)
    assert specs
    for spec in specs.values():
        page = plugin_pages.pages()[f"plugins/{registry.manager().owner(spec)}.md"]
        config_class = spec.resolve().config_class
        known, base = ({field.name for field in dataclasses.fields(c)} for c in (config_class, config_class.__base__))
        added = known - base
        assert added
        assert {name for name in added if f"| `{name}` |" in page} == added
        assert "| `output_dir` |" not in page


def test_plugin_that_is_missing_from_the_site_is_reported(monkeypatch):
    manager = PluginManager([])
    manager.register(object(), "empty")
    monkeypatch.setattr(registry, "manager", lambda: manager)
    assert "hfkv-kivi: not installed" in plugin_pages.missing()


@pytest.mark.parametrize("nbits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("tokens", [500, 4095])
def test_bytes_are_those_of_the_formula(nbits, group_size, tokens):
    residual, sink, width = 128, 4, 32
    blocks = (tokens - sink - residual) // group_size
    packed = blocks * group_size * (nbits + 32 / group_size)
    expected = (packed + (sink + residual + group_size) * width) / tokens
    config = LlamaConfig(num_hidden_layers=1, hidden_size=128, num_attention_heads=2, num_key_value_heads=2)
    cache = hfkv.make_cache("kivi", config, nbits=nbits, group_size=group_size)
    cache.update(*torch.randn(2, 3, 2, tokens, 64), 0)
    assert hfkv.memory(cache).bits_per_element == pytest.approx(expected, rel=1e-12)


def test_every_hook_and_field_is_explained():
    reference = tables.hook_reference()
    for hook, kind in registry.KINDS.items():
        assert f"## `{hook}`" in reference
        meanings = docstrings.entries(kind.__doc__, "Parameters")
        own = {field.name for field in dataclasses.fields(kind)} - {f.name for f in dataclasses.fields(kind.__base__)}
        assert own == set(meanings), kind.__name__
    assert "::" not in reference.replace("```", "")


def test_ops_are_those_of_the_table():
    shown = tables.op_table()
    assert "### `pack(states, format, quantizer)`" in shown
    assert "### `attend(query, view, mask, scale, causal)`" in shown
    assert "| `mask` | `torch.Tensor | None` | ``[batch or 1, heads or 1, queries, tokens]`` in stored order" in shown
    assert "Returns ``[batch, kv_heads, tokens, head_dim]``." in shown


def test_example_is_shown_whole():
    shown = tables.folder("examples/third_party_cache")
    example = ROOT / "examples" / "third_party_cache"
    for file in [example / "pyproject.toml", *example.glob("*/*.py")]:
        if "tests" not in file.parts:
            assert f'title="{file.relative_to(example)}"\n{file.read_text(encoding="utf-8").strip()}\n```' in shown
    project = tomllib.loads((example / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = list(project["entry-points"]["hfkv"])
    assert re.findall(r"--hfkv-plugin (\w+)", PAGES["writing-a-plugin.md"]) == names
    assert re.findall(r'cache_implementation="(\w+)"', PAGES["writing-a-plugin.md"])[0] in names


FIGURE = {
    "title": "Quality", "plugins": ["kivi"], "about": "What was run.", "command": "python run.py",
    "versions": {"torch": "2.13.0"}, "columns": {"nbits": "Bits", "kl": "KL"}, "rows": [{"nbits": 4, "kl": 0.00591234}],
}  # fmt: skip


def test_figures_come_from_the_files(tmp_path):
    assert figures.about("kivi", tmp_path) == ""
    (tmp_path / "quality.json").write_text(json.dumps(FIGURE))
    assert "| Bits | KL |\n| --- | --- |\n| 4 | 0.005912 |" in figures.about("kivi", tmp_path)
    assert "Command: `python run.py`. With torch 2.13.0." in figures.every(tmp_path)
    assert figures.about("hqq", tmp_path) == ""


@pytest.mark.parametrize("change", [{"rows": [{"nbits": 4}]}, {"note": "no such key"}])
def test_figure_of_another_form_is_refused(tmp_path, change):
    (tmp_path / "quality.json").write_text(json.dumps(FIGURE | change))
    with pytest.raises(ValueError, match=r"quality\.json"):
        figures.load(tmp_path)


def test_figure_that_is_not_there_is_refused(tmp_path):
    picture = {"figure": {"file": "quality.svg", "description": "quality over bits"}}
    (tmp_path / "quality.json").write_text(json.dumps(FIGURE | picture))
    with pytest.raises(ValueError, match=r"quality\.json: there is no file quality\.svg beside it"):
        figures.load(tmp_path)
    (tmp_path / "quality.svg").write_text("<svg/>")
    assert "![quality over bits](quality.svg)\n\n| Bits | KL |" in figures.every(tmp_path)
    assert f"![quality over bits](../{tmp_path.name}/quality.svg)" in figures.about("kivi", tmp_path, top="../")


def test_long_table_is_folded(tmp_path):
    (tmp_path / "quality.json").write_text(json.dumps(FIGURE | {"rows": FIGURE["rows"] * 41}))
    assert "<summary>All 41 rows</summary>\n\n| Bits | KL |" in figures.every(tmp_path)
    (tmp_path / "quality.json").write_text(json.dumps(FIGURE | {"rows": FIGURE["rows"] * 40}))
    assert "<details" not in figures.every(tmp_path)


def test_committed_figures_can_be_read():
    assert all(figure["rows"] for figure in figures.load())


def test_committed_studies_have_a_figure_and_the_command_that_makes_them():
    found = figures.load(figures.STUDIES)
    assert found
    for study in found:
        name, _, model = study["figure"]["file"].removesuffix(".svg").partition("-")
        assert study["command"].startswith(f"hfkv eval {model} --study {name}")
    # nothing lies there that no study shows
    shown = {study["figure"]["file"] for study in found}
    assert {path.name for path in figures.STUDIES.glob("*.svg")} == shown


def test_docstrings_are_read():
    text = """First line,
    and its end.

    More::

        code()

    Parameters
    ----------
    one, two
        Both of
        these.
    three : int
        That.
    """
    assert docstrings.summary(text) == "First line, and its end."
    assert docstrings.entries(text, "Parameters") == {
        "one": "Both of these.",
        "two": "Both of these.",
        "three": "That.",
    }
    assert "More:\n\n```python\ncode()\n```" in docstrings.markdown(docstrings.sections(text)[""])
