"""`--plot` of `inspect` and `doctor` without matplotlib."""

import pytest

from hf_lowprec.tools.cli import plot_option
from tests.support.command_output import hf_lowprec, refused


@pytest.mark.parametrize("command", [["inspect", "model"], ["doctor", "model", "--lr", "1e-5", "--steps", "10"]])
def test_without_matplotlib(monkeypatch, command):
    monkeypatch.setattr(plot_option, "find_spec", lambda name: None)
    assert "'--plot': it needs matplotlib: pip install '.[plot]'" in refused(*command, "--plot", "out.png")
    assert "matplotlib" not in hf_lowprec(*command).output
