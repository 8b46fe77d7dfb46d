"""The report: one HTML page that holds everything, on a phone and on a desktop, light and dark."""

from __future__ import annotations

import itertools
import re
from html import escape

from hfkv import __version__

from . import figures
from .output import right_columns
from .page import Figure, Page, Table

# a table wider than the screen scrolls, and has a shadow where more of it is
_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1d2129;--dim:#5a6270;--grid:#d9dde3;
--band:rgb(20 50 110/.05);--shade:rgb(0 0 0/.28)}
@media (prefers-color-scheme:dark){:root{--paper:#14171c;--ink:#e4e7ec;--dim:#9aa3b0;--grid:#343a44;
--band:rgb(255 255 255/.04);--shade:rgb(255 255 255/.3)}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1.2rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:break-word}
h1{font-size:1.5rem;line-height:1.2;margin:.2rem 0 1rem}
h2{font-size:1.1rem;margin:2rem 0 .5rem}
dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.1rem 1rem;margin:0}
dt,.note,footer{color:var(--dim)} dd{margin:0}
.wide{overflow-x:auto;border:1px solid var(--grid);border-radius:6px;background:
linear-gradient(to right,var(--paper) 40%,transparent) 0 0/2.4rem 100% no-repeat local,
linear-gradient(to left,var(--paper) 40%,transparent) 100% 0/2.4rem 100% no-repeat local,
linear-gradient(to right,var(--shade),transparent) -2px 0/.8rem 100% no-repeat scroll,
linear-gradient(to left,var(--shade),transparent) calc(100% + 2px) 0/.8rem 100% no-repeat scroll}
table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{padding:.35rem .7rem;text-align:left;vertical-align:top}
th{border-bottom:1px solid var(--grid);vertical-align:bottom}
td:first-child:not(.n){min-width:7rem} td.n,td span{white-space:nowrap}
th.n,td.n{text-align:right;font-variant-numeric:tabular-nums}
tr:nth-child(even) td{background:var(--band)}
figure{margin:0} svg{display:block;width:100%;max-width:46rem;height:auto}
.note{font-size:.85rem;margin:.4rem 0 0}
footer{margin-top:3rem;font-size:.85rem}
@media (max-width:40rem){body{padding:.8rem} dl{grid-template-columns:minmax(0,1fr)} dd{margin-bottom:.4rem}
table{font-size:.72rem} th,td{padding:.25rem .3rem} td.n,td span{white-space:normal}
td:first-child:not(.n){min-width:0}}
"""


def html(page: Page) -> str:
    """The page as a document that loads nothing."""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in page.facts.items())
    numbers = itertools.count()
    parts = "".join(
        _table(part) if isinstance(part, Table) else _figure(part, f"f{next(numbers)}-") for part in page.parts
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(page.title)}</title><style>{_STYLE}</style></head>\n<body><h1>{escape(page.title)}</h1>"
        f"<dl>{facts}</dl>{parts}<footer>hfkv {__version__}</footer></body></html>\n"
    )


def _table(part: Table) -> str:
    kinds = [' class="n"' if right else "" for right in right_columns(part)]
    head = "".join(f"<th{kind}>{escape(text)}</th>" for kind, text in zip(kinds, part.header, strict=True))
    rows = "".join(
        "<tr>" + "".join(f"<td{kind}>{_cell(text)}</td>" for kind, text in zip(kinds, row, strict=True)) + "</tr>\n"
        for row in part.rows
    )
    return (
        f"<section><h2>{escape(part.title)}</h2>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f"{_notes(part)}</section>\n"
    )


def _cell(text: str) -> str:
    # an interval stays on one line where there is room, and 1e-05 always: a word joiner after the hyphen
    whole = re.sub(r"(\de-)(\d)", r"\1&#8288;\2", escape(text))
    return re.sub(r"\([^()]+ to [^()]+\)", r"<span>\g<0></span>", whole)


def _figure(part: Figure, prefix: str) -> str:
    # several figures share the page: each has its own ids
    drawn = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}", figures.svg(part))
    label = f'<svg role="img" aria-label="{escape(part.description)}"'
    return (
        f"<section><h2>{escape(part.title)}</h2><figure>{drawn.replace('<svg', label, 1)}</figure>"
        f"{_notes(part)}</section>\n"
    )


def _notes(part: Table | Figure) -> str:
    return "".join(f'<p class="note">{escape(note)}</p>' for note in part.notes)
