"""Predictions of `hf-lowprec doctor` for torch's AdamW in BF16 at a constant rate, before the run."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hf_lowprec.integrations.checkpoint_files.stored_tensors import StoredTensors, TensorInfo
from hf_lowprec.tools.doctor.planned_run import plan_run
from hf_lowprec.tools.doctor.prediction import count_weights, predict_rounding
from hf_lowprec.tools.doctor.rounded_updates import RoundedUpdates
from hf_lowprec.tools.doctor.update_sizes import Directions, noise_directions


def prediction(
    weights: Mapping[str, Tensor], rate: float, steps: int, directions: Tensor | None = None
) -> dict[str, RoundedUpdates]:
    """The prediction by mode for a run without decay; with `directions`, from Adam's moments too."""
    tensors = StoredTensors({n: TensorInfo(w.shape, w.dtype) for n, w in weights.items()}, weights.__getitem__)
    run = plan_run("adamw_torch_fused", rate, steps, "constant")
    noise = noise_directions(run.algorithm, run.betas)
    sample = None if directions is None else Directions(directions.double().abs(), 0.0, noise.persistence)
    return predict_rounding(count_weights(tensors), run, sample)
