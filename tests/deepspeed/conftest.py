from importlib.util import find_spec

from tests.distributed.conftest import processes, store  # noqa: F401

collect_ignore_glob = [] if find_spec("deepspeed") else ["test_*.py"]
"""Without DeepSpeed, there is nothing to test."""
