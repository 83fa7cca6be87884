"""The parts of `benchmarks/gpu_step.py`, one file per thing that is measured, and `report.py` for the tables."""

from checkout import make_importable

make_importable()
