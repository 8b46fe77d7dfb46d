"""What all commands share: the page on a terminal, as JSON, and as a report."""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass
from html.parser import HTMLParser

import pytest
from rich.console import Console

from hfkv_lab import output
from hfkv_lab.page import Figure, Page, Table
from hfkv_lab.report import html


@dataclass(frozen=True)
class Result:
    name: str
    values: tuple[float, ...]


def draw(canvas):
    axes = canvas.subplots()
    axes.plot([1, 2, 3], [1, 4, 9], marker="o", label="squares")
    axes.set_xlabel("x")
    axes.legend()


PAGE = Page(
    "Sizes & <speeds>",
    {"model": "tiny", "device": "cpu"},
    [
        Table(
            "Bytes", ("cache", "bytes", "ratio"), [("plain [x]", "1,024", "1.0x"), ("kivi", "128", "8.0x")], ["a note"]
        ),
        Figure("Growth", draw, "a curve that rises"),
        Figure("Growth again", draw, "the same curve"),
    ],
    Result("tiny", (1.0, float("nan"), float("inf"))),
)


class Checker(HTMLParser):
    """Notes what is opened and not closed, every id, and everything that would be loaded."""

    VOID = frozenset({"meta", "br", "hr", "img", "link"})

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.uses, self.loads = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.note(tag, attrs)

    def handle_startendtag(self, tag, attrs):
        self.note(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def note(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            self.uses += re.findall(r"url\(#([^)]+)\)", value or "")
            if name in ("src", "href", "xlink:href"):
                (self.uses if value.startswith("#") else self.loads).append(value.lstrip("#"))
        if tag in ("script", "link", "iframe", "object"):
            self.loads.append(tag)


def test_report_is_whole_and_loads_nothing():
    text = html(PAGE)
    found = Checker(text)
    assert found.open == []
    assert found.loads == []
    assert "@import" not in text
    assert "<title>Sizes &amp; &lt;speeds&gt;</title>" in text
    assert text.count("<svg") == 2
    assert 'aria-label="a curve that rises"' in text
    # what a figure refers to is its own: two of them share the page
    assert len(found.ids) == len(set(found.ids))
    assert found.uses
    assert set(found.uses) <= set(found.ids)


def test_numbers_do_not_break_and_intervals_stay_whole():
    text = html(Page("", {}, [Table("", ("a", "b"), [("1.2e-05", "0.1 (<1e-05 to 0.2)")])], None))
    assert '<td class="n">1.2e-&#8288;05</td>' in text
    assert "<td>0.1 <span>(&lt;1e-&#8288;05 to 0.2)</span></td>" in text


def test_plot_takes_the_colours_of_the_page():
    text = html(PAGE)
    assert "var(--ink)" in text.partition("<svg")[2]
    assert "var(--grid)" in text.partition("<svg")[2]
    assert "prefers-color-scheme:dark" in text
    # nothing black or white is left that one of the two could not show
    assert not re.search(r"(fill|stroke): #(000000|ffffff)", text)


def test_same_result_is_the_same_page():
    assert html(PAGE) == html(PAGE)


def test_terminal_shows_tables_and_json_shows_data(capsys):
    target = io.StringIO()
    output.finish(Console(file=target, width=60), PAGE, as_json=False, report=None)
    lines = target.getvalue().splitlines()
    assert "device: cpu" in lines
    assert any(re.fullmatch(r"plain \[x\]  1,024   1\.0x\s*", line) for line in lines), lines
    assert any(re.fullmatch(r"kivi         128   8\.0x\s*", line) for line in lines), lines
    assert "a note" in lines
    output.finish(Console(file=target), PAGE, as_json=True, report=None)
    assert json.loads(capsys.readouterr().out) == {"name": "tiny", "values": [1.0, None, None]}


def test_report_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    output.check_report(tmp_path / "out.html")
    with pytest.raises(ValueError, match=r"--report .*out\.html: there is no folder .* Fix: make it first"):
        output.check_report(tmp_path / "none" / "out.html")


@pytest.mark.parametrize(
    "text", ["1,024", "3.5", "1.2e-05", "12 MiB", "8.0x", "45.3%", "-", "1.0 ± 0.2", "> 4", "124 tokens/s"]
)
def test_numbers_are_aligned_right(text):
    assert output.right_columns(Table("", ("a",), [(text,)])) == [True]


@pytest.mark.parametrize("text", ["kivi", "4 bits each", "float16", "1-3"])
def test_words_are_aligned_left(text):
    assert output.right_columns(Table("", ("a",), [(text,)])) == [False]
