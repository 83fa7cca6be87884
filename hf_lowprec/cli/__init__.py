"""The command line, one file per command."""

from __future__ import annotations

import typer

from hf_lowprec.cli import demo, doctor, env, estimate, export, inspect, run

app = typer.Typer(
    help="Train Hugging Face models in pure BF16 with the accuracy of FP32.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("env")(env.env)
app.command("estimate")(estimate.estimate)
app.command("export")(export.export)
app.command("inspect")(inspect.inspect)
app.command("run", context_settings=run.CONTEXT)(run.run)


def main() -> None:
    """Entry point of `hf-lowprec`."""
    app(prog_name="hf-lowprec")
