import pytest

# pytest explains failed asserts only in test modules, unless it is asked before the import.
pytest.register_assert_rewrite("tests.support.training.tiny_trainer")
