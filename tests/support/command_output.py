"""The output of a command as plain text."""

from typing import Protocol


class Printed(Protocol):
    """The result of a command; typer's and click's have this."""

    @property
    def output(self) -> str: ...


def unboxed(result: Printed) -> str:
    """The output in one line, without the box that typer draws around errors and help."""
    return " ".join(result.output.replace("│", " ").split())
