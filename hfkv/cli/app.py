"""The application: subcommands that are listed from their specs and loaded when invoked, and what errors look like."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from .. import __version__, registry
from ..specs import SubcommandSpec
from .console import errors

# hfkv's own; a plugin's subcommand cannot take one of these names
OWN = {
    spec.name: spec
    for spec in (
        SubcommandSpec(
            name="list",
            summary="what is installed: plugins, caches, quantizers, kernels; what is missing and why",
            load="hfkv.cli.list:main",
        ),
        SubcommandSpec(
            name="demo",
            summary="a real model with the plain cache and with kivi, side by side",
            load="hfkv.cli.demo:main",
        ),
    )
}

# what the user can mend; the message says how, and a traceback would only hide it
_MISTAKES = (ValueError, TypeError, ImportError, NotImplementedError, OSError)


class Subcommands(TyperGroup):
    """hfkv's subcommands and the plugins'; only the one that is invoked is imported."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        specs = registry.manager().specs(SubcommandSpec) | OWN
        for name in [*OWN, *sorted(specs.keys() - OWN.keys())]:
            self.commands[name] = TyperCommand(name, help=escape(specs[name].summary))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """The subcommand to run, loaded."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if command is None else _load(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        """Run a subcommand; an error is one line, unless ``--debug`` asks for its traceback."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            errors().print("interrupted")
            raise typer.Exit(130) from None
        except Exception as error:
            # typer shows its own errors itself, and they carry the exit code
            if ctx.params["debug"] or isinstance(error, typer.Abort | BrokenPipeError) or hasattr(error, "exit_code"):
                raise
            message = str(error).strip() or type(error).__name__
            if not isinstance(error, _MISTAKES):
                message = f"{type(error).__name__}: {message}"
            command = f"hfkv {ctx.invoked_subcommand or ''}".rstrip()
            errors().print(f"[red]{command}:[/] {escape(message)}", soft_wrap=True)
            if not isinstance(error, _MISTAKES):
                errors().print("[dim]hfkv --debug ... shows the traceback[/]")
            raise typer.Exit(1) from None


def _load(name: str) -> Any:
    """The command of a subcommand's function."""
    if name in OWN:
        function = OWN[name].resolve()
    else:
        spec = registry.manager().find(SubcommandSpec, name, "subcommand")
        try:
            function = spec.resolve()
        except Exception as error:
            plugin = registry.manager().owner(spec)
            raise RuntimeError(f"plugin {plugin!r} is broken: {type(error).__name__}: {error}") from error
    single = typer.Typer(add_completion=False)
    single.command(name)(function)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=Subcommands,
    add_completion=False,
    no_args_is_help=True,
    # errors are ours to show: see Subcommands.invoke
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"hfkv {__version__}")
        raise typer.Exit


@app.callback()
def hfkv(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """KV caches, quantizers and kernels as plugins for plain Hugging Face model.generate."""
