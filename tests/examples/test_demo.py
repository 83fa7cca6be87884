"""`make demo` in its smallest size: a table and a plot of each stage; only rounding to nearest loses updates."""

from pathlib import Path

import pytest

from tests.support.processes import forkserver

pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_begins():
    """It imports what it needs; the test below, which runs it, is a nightly one."""
    result = forkserver.run(ROOT / "examples" / "demo.py", ["--help"], timeout=60)
    assert result.returncode == 0 and "--quick" in result.stdout, result.stderr[-3000:]


@pytest.mark.every_case
@pytest.mark.slow
def test_the_demo_compares_ways_of_training(tmp_path):
    result = forkserver.run(ROOT / "examples" / "demo.py", ["--steps", "2", "--output-dir", str(tmp_path)], timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    out = result.stdout.splitlines()
    assert out[0] == "8 runs of 2 steps" and out[1] == "run 1 of 8: pretraining, FP32 AdamW"
    rows = [line.split()[2:] for line in out if line.strip().startswith(("FP32 AdamW  ", "BF16 ")) and "%" in line]
    assert len(rows) == 8
    exact, nearest, *ours = rows[4:]  # of fine-tuning
    sizes = [row[-5:-2] for row in (exact, nearest, *ours)]
    assert sizes == [
        ["4.00", "4.00", "8.00"],
        ["2.00", "2.00", "4.00"],
        ["2.00", "2.00", "6.00"],
        ["2.00", "2.00", "4.01"],
    ]
    lost = [float(row[-2].rstrip("%")) for row in (exact, nearest, *ours)]
    assert lost[1] > 30 and max(abs(lost[0]), abs(lost[2])) < 0.1 and abs(lost[3]) < 10
    assert abs(float(ours[0][1])) < 0.001 < float(nearest[1])
    for stage in ("pretraining", "fine-tuning"):
        assert (tmp_path / f"{stage}.png").read_bytes().startswith(b"\x89PNG")
