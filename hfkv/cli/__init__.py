"""The command ``hfkv``: one file a subcommand, those of plugins beside them; nothing is loaded before it is used."""

from __future__ import annotations


def main() -> None:
    """Run the command line; what the script ``hfkv`` calls."""
    from .app import app

    app(prog_name="hfkv")
