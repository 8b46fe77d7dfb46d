"""Run the Python of a page, as a reader would: ``python runnable.py PAGE``.

Every block marked as Python runs, in the order of the page and in one namespace. A text block titled "output" must be
what the block before it printed. A block that cannot run here says why, in a comment on the line before it::

    <!-- not run: needs a GPU -->
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(
    r"^(?P<reason><!-- not run: (?P<why>[^\n]+) -->\n)?```python\n(?P<code>.*?)^```$"
    r"(?:\n\n```text title=\"output\"\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One block of Python.

    Attributes
    ----------
    line
        The line of the page on which the code begins.
    code, output
        The code, and what it has to print; None where the page does not say.
    reason
        Why it cannot run; None for a block that runs.
    """

    line: int
    code: str
    output: str | None
    reason: str | None


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    return [
        Block(page.count("\n", 0, match.start("code")) + 1, match["code"], match["output"], match["why"])
        for match in _FENCE.finditer(page)
    ]


def run(path: Path, replace: tuple[tuple[str, str], ...] = ()) -> int:
    """Run a page in ``__main__``; return how many blocks ran.

    Parameters
    ----------
    replace
        Spellings that another release needs, each with what stands for it.

    Raises
    ------
    AssertionError
        A block printed something else than the page shows.
    """
    namespace = vars(sys.modules["__main__"])
    count = 0
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.reason is not None:
            continue
        code = block.code
        for old, new in replace:
            code = code.replace(old, new)
        printed = io.StringIO()
        # padded, so that a traceback names the line of the page
        compiled = compile("\n" * (block.line - 1) + code, str(path), "exec")
        with contextlib.redirect_stdout(printed):
            exec(compiled, namespace)
        if block.output is not None and printed.getvalue() != block.output:
            raise AssertionError(
                f"{path.name}, line {block.line}: printed\n{printed.getvalue()}\nand the page shows\n{block.output}"
            )
        count += 1
    return count


if __name__ == "__main__":
    # before transformers 5.24 a cache is passed under another name
    pairs = tuple((old, new) for old, new in (argument.split("=>") for argument in sys.argv[2:]))
    print(f"{run(Path(sys.argv[1]), pairs)} blocks ran")
