"""The notebook runs from its first cell to its last, without Jupyter: its code is a script but for the installation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.processes import forkserver

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"


def script() -> str:
    """The code cells in order; `pass` takes the place of lines that Jupyter alone understands."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return re.sub(r"^( *)[%!].*$", r"\1pass", code, flags=re.MULTILINE)


def test_it_compiles_and_shows_what_it_printed() -> None:
    compile(script(), str(NOTEBOOK), "exec")
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    assert "image/png" in {kind for output in outputs for kind in output.get("data", {})}
    printed = "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
    check_losses(printed)
    assert "site-packages" not in printed and "/home" not in printed


def check_losses(printed: str) -> None:
    """Split weights end where FP32 does; rounding to nearest makes less than half of its progress."""
    fp32, nearest, split = (
        tuple(map(float, losses)) for losses in re.findall(r"validation loss ([\d.]+) -> ([\d.]+)", printed)
    )
    assert split[1] == pytest.approx(fp32[1], abs=2e-3)
    assert nearest[1] - fp32[1] > 0.5 * (fp32[0] - fp32[1])


@pytest.mark.every_case
@pytest.mark.slow
def test_split_weights_end_where_fp32_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebook.py").write_text(script(), encoding="utf-8")
    done = forkserver.run(tmp_path / "notebook.py", [], timeout=280, MPLBACKEND="agg")
    assert done.returncode == 0, done.stderr[-3000:]
    check_losses(done.stdout)
    bf16, full = (load_file(tmp_path / name / "model.safetensors") for name in ("final", "final-fp32"))
    head = "lm_head.weight"
    assert bf16[head].dtype == torch.bfloat16 and not torch.equal(bf16[head].float(), full[head])
    assert (bf16[head].float() - full[head]).abs().max() <= 2**-7 * full[head].abs().max()  # rounded up or down
