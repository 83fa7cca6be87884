"""Predictions of `hf-lowprec doctor` for torch's AdamW in BF16 at a constant rate, before the run."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hf_lowprec.integrations.checkpoint_files.stored_tensors import StoredTensors, TensorInfo
from hf_lowprec.tools.doctor.planned_run import plan_run
from hf_lowprec.tools.doctor.prediction import Prediction, count_weights, predict_rounding
from hf_lowprec.tools.doctor.update_sizes import ALL


def prediction(weights: Mapping[str, Tensor], rate: float, steps: int, directions: Tensor | None = None) -> Prediction:
    """The prediction for a run without decay; with `directions`, from Adam's moments too."""
    tensors = StoredTensors({n: TensorInfo(w.shape, w.dtype) for n, w in weights.items()}, weights.__getitem__)
    planned = plan_run("adamw_torch_fused", None, rate, "constant", None, 0, steps, 0.0, (None, None))
    return predict_rounding(count_weights(tensors), planned, None if directions is None else {ALL: directions})
