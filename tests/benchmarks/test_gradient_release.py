"""The benchmark of gradient release, once on a tiny model."""

import importlib.util
from pathlib import Path

import pytest
import torch

from hf_lowprec.optim.gradient_release import buckets as gradient_buckets

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gradient_release.py"


def test_it_runs(monkeypatch, capsys):
    monkeypatch.setattr(gradient_buckets, "BUCKET_ELEMENTS", gradient_buckets.BUCKET_ELEMENTS)  # the benchmark sets it
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("benchmark", SCRIPT)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    threads = torch.get_num_threads()
    size = "--hidden 16 --layers 1 --vocabulary 32 --tokens 4 --rounds 1"
    try:
        benchmark.main([*size.split(), "--buckets", "64", "1000000"])
    finally:
        torch.set_num_threads(threads)
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines()[3:]]
    assert [line[1].strip() for line in lines] == ["not released", "64", "1,000,000"]
    assert [float(cell) for cell in lines[0][3:5]] == pytest.approx([1.0, 1.0])
