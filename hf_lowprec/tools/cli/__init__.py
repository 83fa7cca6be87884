"""The command line, one file per command.

At their top, these files import only typer, rich and the standard library, so that help and argument errors appear at
once. What a command needs is imported when it runs.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from hf_lowprec.tools.cli import doctor, estimate, export, inspect, plot, run


class _FlagsWithoutType:
    """Help without the type that typer 0.29 shows after flags, as if `--json <bool>` took a value."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Group(_FlagsWithoutType, TyperGroup):
    """All commands."""


class _Command(_FlagsWithoutType, TyperCommand):
    """One command. It says what to install if a package is missing; scripts started by `run` report that themselves."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            from hf_lowprec.oldest_versions import COMMAND_LINE, OLDEST, install_command

            library = (error.name or "").partition(".")[0]
            if self.name == "run" or library not in {*OLDEST, *COMMAND_LINE, "matplotlib"}:
                raise
            typer.echo(f"Error: {self.name} needs {library}: {install_command(library)}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Group,
    help="Train Hugging Face models in pure BF16 with the accuracy of FP32.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("doctor")(doctor.doctor)
app.command("estimate")(estimate.estimate)
app.command("export")(export.export)
app.command("inspect")(inspect.inspect)
app.command("plot")(plot.plot)
app.command("run", context_settings=run.CONTEXT)(run.run)


def _print_version(requested: bool) -> None:
    if requested:
        import hf_lowprec

        typer.echo(f"hf-lowprec {hf_lowprec.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Handle the options that belong to no command."""


for _command in app.registered_commands:
    _command.cls = _Command


def main() -> None:
    """Run `hf-lowprec` or `python -m hf_lowprec`."""
    app(prog_name="hf-lowprec")
