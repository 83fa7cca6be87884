"""`--plot` of `inspect` and `doctor` without matplotlib."""

import pytest
from typer.testing import CliRunner

from hf_lowprec.cli import app, plot_option
from tests.support.command_output import unboxed


@pytest.mark.parametrize("command", [["inspect", "model"], ["doctor", "model", "--lr", "1e-5", "--steps", "10"]])
def test_without_matplotlib(monkeypatch, command):
    monkeypatch.setattr(plot_option, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, [*command, "--plot", "out.png"])
    assert result.exit_code == 2
    assert "'--plot': it needs matplotlib: pip install '.[plot]'" in unboxed(result)
    without = CliRunner().invoke(app, command)
    assert "matplotlib" not in without.output
