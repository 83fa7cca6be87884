"""The log file that a training run writes to its output folder: one JSON object per line, for plots and other programs.

`records.py` is the format. Reading and writing need no torch.
"""

from hf_lowprec.monitor.metrics_file.reader import MetricsFile, RunPart, read_metrics
from hf_lowprec.monitor.metrics_file.records import METRICS_NAME, MeasuredPrecision, RunRecord, StepRecord
from hf_lowprec.monitor.metrics_file.writer import MetricsWriter

__all__ = [
    "METRICS_NAME",
    "MeasuredPrecision",
    "MetricsFile",
    "MetricsWriter",
    "RunPart",
    "RunRecord",
    "StepRecord",
    "read_metrics",
]
