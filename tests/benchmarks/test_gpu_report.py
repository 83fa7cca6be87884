"""The report of a GPU machine, as far as it goes without a GPU."""

import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as when the script runs

import gpu_report  # noqa: E402


@pytest.mark.slow
def test_the_rehearsal_leaves_one_file(tmp_path, capsys):
    status = gpu_report.main(["--rehearse", "--minutes", "5", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    with zipfile.ZipFile(path) as packed:
        names, report = packed.namelist(), packed.read("report.md").decode()
        assert "- torch: " in packed.read("machine.txt").decode()
    assert {"report.md", "machine.txt", "tests.log", "tests.xml", "benchmark.log"} < set(names)
    assert {Path(name).suffix for name in names} >= {".json", ".md"}
    assert str(path) in printed
    assert "One step of" in report  # the benchmark's tables
    if torch.cuda.is_available():
        assert " 0 failed" in report
    else:
        assert "- tests: 0 passed, 0 failed, " in report  # skipped
    assert status == 0, report


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert gpu_report.main(["--output", str(tmp_path)]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_failures_are_named(tmp_path):
    tests = "def test_right(): pass\ndef test_wrong(): assert 1 == 2\n"
    (tmp_path / "test_both.py").write_text(tests)
    record = tmp_path / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)]
    done = gpu_report.run([*command, f"--junitxml={record}"], tmp_path / "tests.log", 300)
    assert done.status == 1
    assert "1 failed, 1 passed" in (tmp_path / "tests.log").read_text()
    counts, failed = gpu_report.test_results(record)
    assert counts == {"passed": 1, "failed": 1, "skipped": 0}
    text = gpu_report.summary(done, record, gpu_report.Outcome(None, 3.0), [])
    assert [name.split("::")[1] for name in failed] == ["test_wrong"]
    assert "1 passed, 1 failed, 0 skipped (exit status 1" in text
    assert "::test_wrong`" in text
    assert "stopped, since its time was over, 3 s" in text


def test_a_command_that_takes_too_long_is_stopped(tmp_path):
    done = gpu_report.run([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log", 1)
    assert done.status is None
    assert done.seconds < 300


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


def test_children_are_stopped_as_well(tmp_path, time_is_over_with, monkeypatch):
    # It ignores the interrupt, and so does its child, which writes to a file as long as it lives.
    child = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    child += f"while True: open({str(tmp_path / 'alive')!r}, 'a').write('.'); time.sleep(0.05)\n"
    (tmp_path / "child.py").write_text(child)
    code = "import signal, subprocess, sys\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    code += f"subprocess.run([sys.executable, {str(tmp_path / 'child.py')!r}])\n"
    time_is_over_with(tmp_path / "alive")
    monkeypatch.setattr(gpu_report, "GRACE", 1.0)
    done = gpu_report.run([sys.executable, "-c", code], tmp_path / "log", 300)
    assert done.status is None
    length = (tmp_path / "alive").stat().st_size
    time.sleep(0.5)
    assert (tmp_path / "alive").stat().st_size == length


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN], ids=["foreground", "background"])
def interrupts(request):
    """How this process handles SIGINT, which shells make programs in the background ignore."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupted_pytest_writes_its_record(tmp_path, time_is_over_with, monkeypatch):
    slow = f"open({str(tmp_path / 'slow test')!r}, 'w').close(); time.sleep(600)"
    (tmp_path / "test_both.py").write_text(f"import time\ndef test_quick(): pass\ndef test_slow(): {slow}\n")
    record = tmp_path / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)]
    time_is_over_with(tmp_path / "slow test")
    monkeypatch.setattr(gpu_report, "GRACE", 300.0)
    done = gpu_report.run([*command, f"--junitxml={record}"], tmp_path / "tests.log", 300)
    assert done.status is None
    counts, _ = gpu_report.test_results(record)
    assert counts["passed"] == 1
