"""Find the folder with the files of a model that a user named."""

from __future__ import annotations

import os
from pathlib import Path

from hf_lowprec.user_inputs.input_errors import InputError, check_path_exists, explain_input_errors


def find_model_folder(name: str) -> Path:
    """The folder of a model.

    Args:
        name: a folder, or the name of a model on the Hub that has been downloaded before; nothing is downloaded.

    Raises:
        InputError: there is no such folder, and no such model in the cache.
    """
    from transformers.utils import cached_file

    check_path_exists(name, "MODEL")
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path
    with explain_input_errors(f"{name!r} is neither a folder nor a model in the cache"):
        config = cached_file(name, "config.json", local_files_only=True)
    if config is None:
        raise InputError(f"{name!r} is neither a folder nor a model in the cache")
    return Path(config).parent
