"""The report of a GPU machine, as far as it goes without a GPU."""

import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as when the script runs

import gpu_report  # noqa: E402


@pytest.mark.every_case
@pytest.mark.slow
def test_the_rehearsal_leaves_one_file(tmp_path, capsys, monkeypatch):
    # All of them would take the interpreter all the time there is.
    monkeypatch.setattr(gpu_report, "TESTS", ["tests/gpu/test_step_on_gpu.py", "tests/optim/test_sums.py"])
    status = gpu_report.main(["--rehearse", "--minutes", "5", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    with zipfile.ZipFile(path) as packed:
        names, report = packed.namelist(), packed.read("report.md").decode()
        assert f"torch {torch.__version__}" in packed.read("machine.txt").decode()
    assert {"report.md", "machine.txt", "tests.log", "tests.txt", "benchmark.log"} < set(names)
    assert {Path(name).suffix for name in names} >= {".json", ".md"}
    assert str(path) in printed
    assert "One step of" in report  # the benchmark's tables
    counted = re.search(r"- tests: passed: (\d+), failed: 0, skipped: (\d+), not reached: 0 \(exit status 0, ", report)
    assert counted and all(map(int, counted.groups()))  # those of the first file need a GPU
    assert status == 0, report


@pytest.mark.every_case
@pytest.mark.slow
def test_it_runs_what_runs_on_a_gpu():
    """Every file whose tests run there, and of these little else: the time is short."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q"]
    command += ["-k", gpu_report.ON_A_GPU, "tests/gpu", "tests/optim"]
    chosen = {name: value for name, value in os.environ.items() if name != "HF_LOWPREC_EVERY_CASE"}
    ids = subprocess.run(command, cwd=ROOT, env=chosen, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [name.split("::")[0] for name in ids if "::" in name]
    elsewhere = {"tests/optim/test_sharding.py"}  # which skips itself with a GPU
    assert {*files} - elsewhere == {*gpu_report.TESTS}
    assert len(files) < 1000
    assert gpu_report.TESTS[-1] == "tests/gpu/test_sanitizer_on_gpu.py"


@pytest.fixture
def time_is_over_with(monkeypatch):
    """A function that ends the time of the next command when a file exists, however slow the machine is."""

    def set_up(file: Path) -> None:
        class Process(subprocess.Popen):
            asked = False

            def wait(self, timeout=None):
                if self.asked:
                    return super().wait(timeout)
                self.asked = True
                end = time.monotonic() + timeout
                while not file.exists() and self.poll() is None and time.monotonic() < end:
                    time.sleep(0.05)
                assert file.exists(), (self.returncode, timeout)
                raise subprocess.TimeoutExpired(self.args, timeout)

        monkeypatch.setattr(subprocess, "Popen", Process)

    return set_up


def test_results_are_recorded_until_the_time_is_over(tmp_path, time_is_over_with, monkeypatch):
    first, second = tmp_path / "test_b_gpu.py", tmp_path / "test_a_gpu.py"  # not in alphabetical order
    first.write_text(
        "import pytest\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert 1 == 2\n"
        "@pytest.fixture\ndef broken():\n    yield\n    raise OSError('broken')\n"
        "def test_teardown(broken): pass\n"
        "def test_skipped(): pytest.skip('not here')\n"
    )
    begun = tmp_path / "begun"
    second.write_text(
        f"import time\ndef test_slow(): open({str(begun)!r}, 'w').close(); time.sleep(600)\ndef test_later(): pass\n"
    )
    time_is_over_with(begun)
    monkeypatch.setattr(gpu_report, "WORKERS", 1)
    record = tmp_path / "tests.txt"
    done = gpu_report.run_tests([str(first), str(second)], record, 300)
    assert done.status is None
    counts, failed = gpu_report.test_results(record)
    assert counts == {"passed": 1, "failed": 2, "skipped": 1, "not reached": 2}, record.read_text()
    assert [name.split("::")[1] for name in failed] == ["test_wrong", "test_teardown"]
    assert "assert 1 == 2" in record.read_text()
    text = gpu_report.summary(done, record, gpu_report.Outcome(0, 3.0), [])
    assert "passed: 1, failed: 2, skipped: 1, not reached: 2 (stopped, since its time was over" in text
    assert "::test_wrong`" in text


def test_children_are_stopped_as_well(tmp_path, time_is_over_with):
    # It waits for its child, which writes to a file as long as it lives.
    child = f"import time\nwhile True: open({str(tmp_path / 'alive')!r}, 'a').write('.'); time.sleep(0.05)\n"
    (tmp_path / "child.py").write_text(child)
    code = f"import subprocess, sys; subprocess.run([sys.executable, {str(tmp_path / 'child.py')!r}])"
    time_is_over_with(tmp_path / "alive")
    done = gpu_report.run([sys.executable, "-c", code], tmp_path / "log", 300)
    assert done.status is None
    length = (tmp_path / "alive").stat().st_size
    time.sleep(0.5)
    assert (tmp_path / "alive").stat().st_size == length
