from tests.distributed.conftest import processes, store  # noqa: F401
