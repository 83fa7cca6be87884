"""`hf-lowprec env` prints what is installed, as Markdown."""

from importlib import metadata

import torch
import transformers

from tests.support.command_output import hf_lowprec


def facts() -> dict[str, str]:
    result = hf_lowprec("env")
    assert result.exit_code == 0, result.output
    assert all(line.startswith("- ") for line in result.output.splitlines())
    return dict(line[2:].split(": ", 1) for line in result.output.splitlines())


def test_versions_devices_and_backends(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_LOWPREC_CACHE", str(tmp_path))
    found = facts()
    assert (found["torch"], found["transformers"]) == (metadata.version("torch"), transformers.__version__)
    assert found["cache of compiled steps"] == found["HF_LOWPREC_CACHE"] == str(tmp_path)
    assert found["CPU"].endswith("backend native")
    assert sum(name.startswith("GPU ") for name in found) == torch.cuda.device_count()


def test_what_is_not_there_is_said(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr("hf_lowprec.tools.cli.env.PACKAGES", ("torch", "no-such-package"))
    found = facts()
    assert found["no-such-package"] == "not installed"
    assert found["C compiler"].startswith("none (")
    assert found["CPU"].endswith("backend eager")


def test_what_cannot_be_used_is_no_reason_to_fail(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "gcc '")
    monkeypatch.setenv("HF_LOWPREC_CACHE", "~no-such-user/cache")
    found = facts()
    assert found["C compiler"].startswith('none ($CC="gcc \'" is not a valid shell command')
    assert found["cache of compiled steps"].startswith("none (~no-such-user/cache: Could not determine home")
    compiler = tmp_path / "compiler"
    compiler.write_text("no program")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert "cannot be started" in hf_lowprec("env").output
