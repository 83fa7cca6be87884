"""Keep transformers and datasets from printing over a program's own output."""

from __future__ import annotations


def quiet_libraries() -> None:
    """Turn off the progress bars and the advice of transformers and datasets, for this process."""
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
