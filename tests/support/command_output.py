"""Run commands of `hf-lowprec` in this process, and read their output as plain text."""

import sys

from typer.testing import CliRunner, Result

from hf_lowprec.tools.cli import app


def hf_lowprec(*words: object, columns: int = 80) -> Result:
    """Run `hf-lowprec WORDS` on a terminal of that width. What a user would see as a traceback is raised.

    Its exit status would be 1, as if the command had found something wrong. `run` changes `sys.argv` and `sys.path`
    for its script.
    """
    arguments, path = sys.argv, [*sys.path]
    try:
        return CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": str(columns)}, catch_exceptions=False)
    finally:
        sys.argv, sys.path[:] = arguments, path


def refused(*words: object) -> str:
    """The message, in one line, with which a command refuses its arguments."""
    result = hf_lowprec(*words)
    assert result.exit_code == 2 and "Traceback" not in result.output, (words, result.output)
    return unboxed(result)


def unboxed(result: Result) -> str:
    """The output in one line, without the box that typer draws around errors and help."""
    return " ".join(result.output.replace("│", " ").split())
