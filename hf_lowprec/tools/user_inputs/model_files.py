"""Find the folder with the files of a model that a user named."""

from __future__ import annotations

import os
from pathlib import Path

from hf_lowprec.integrations.checkpoint_files.input_errors import InputError, check_path_exists, explain_input_errors

_FILES_ON_THE_HUB = ["model*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "*config.json"]


def find_model_folder(name: str, argument: str = "MODEL") -> Path:
    """The folder of a model.

    Args:
        name: a folder, or a model on the Hub. Its safetensors files and configurations are downloaded, unless they have
            been before.
        argument: the argument that it was passed as, for messages.

    Raises:
        InputError: there is no such folder or model.
    """
    from huggingface_hub import snapshot_download

    check_path_exists(name, argument)
    local = Path(os.path.expanduser(name))
    if local.is_dir():
        return local
    if local.exists():
        raise InputError(f"{argument}: {name!r} is a file; pass the folder that it is in")
    with explain_input_errors(f"{argument}: there is no folder {name!r}, and it cannot be fetched from the Hub"):
        return Path(snapshot_download(name, allow_patterns=_FILES_ON_THE_HUB))
