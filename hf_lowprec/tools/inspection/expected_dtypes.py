"""Find the tensors of a checkpoint that are meant to stay in FP32, from its config.json alone."""

from __future__ import annotations

from pathlib import Path

import torch

from hf_lowprec.casting.cast_plan import make_plan
from hf_lowprec.integrations.checkpoint_files.input_errors import InputError, explain_input_errors
from hf_lowprec.tools.user_inputs.empty_model import build_empty_model, load_config


def cast_to_16_bits(folder: Path) -> set[str] | None:
    """The names of the tensors that `cast_model` would cast; None if the model cannot be built from its config.json."""
    try:
        model = build_empty_model(*load_config(str(folder)))
        with explain_input_errors("no plan"):
            plan = make_plan(model)
    except InputError:
        return None
    return {tensor.name for tensor in plan.tensors if tensor.dtype != torch.float32 and tensor.action != "leave"}
