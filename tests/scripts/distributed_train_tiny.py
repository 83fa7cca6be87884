"""`train_tiny.py`, unmodified, with an end that gloo's teardown cannot spoil (see `leave`)."""

import runpy
from pathlib import Path

from tests.support.processes.ranks import leave

runpy.run_path(str(Path(__file__).with_name("train_tiny.py")), run_name="__main__")
leave()
