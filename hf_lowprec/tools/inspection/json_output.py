"""The facts of checkpoints as JSON, without NaN and infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from hf_lowprec.monitor.findings_catalogue import Finding
from hf_lowprec.rounding import dtype_name
from hf_lowprec.tools.inspection.checkpoint import Checkpoint
from hf_lowprec.tools.inspection.comparison import Comparison

VERSION = 1


def to_json(checkpoints: Iterable[Checkpoint], comparison: Comparison | None, findings: Iterable[Finding]) -> str:
    """One JSON object; its keys are documented in `docs/reference/cli.md`."""
    content = {
        "version": VERSION,
        "checkpoints": [_checkpoint(checkpoint) for checkpoint in checkpoints],
        "comparison": _comparison(comparison) if comparison else None,
        "findings": [finding._asdict() for finding in findings],
    }
    return json.dumps(_finite(content), indent=1, allow_nan=False)


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    norms = checkpoint.norms
    tensors = {
        name: {
            "part": checkpoint.kinds[name],
            "shape": list(tensor.shape),
            "dtype": dtype_name(tensor.dtype),
            "bytes": tensor.nbytes,
            "ones": tensor.ones,
            "zeros": tensor.zeros,
            "nonfinite": tensor.nonfinite,
            "constant": tensor.constant,
            "rms": tensor.rms,
            "coarser_than_update": tensor.coarser_than(checkpoint.update),
            "at_initial_value": tensor.at_initial_value if name in norms else None,
        }
        for name, tensor in checkpoint.tensors.items()
    }
    states = {
        state.name: {
            **state.group.describe(),
            "step": state.step,
            "dtypes": {name: dtype_name(dtype) for name, dtype in state.dtypes.items()},
            "bytes": state.nbytes,
            "has_gradients": state.has_gradients,
            "compensation": state.compensation,
        }
        for state in checkpoint.states
    }
    return {
        "name": checkpoint.name,
        "step": checkpoint.step,
        "update": checkpoint.update,
        "tensors": tensors,
        "optimizer": states,
        "notes": checkpoint.unread,
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    tensors = {
        name: {
            "part": comparison.later.kinds[name],
            "parameters": change.parameters,
            "moved": change.moved,
            "distance": change.distance,
            "relative_distance": change.relative_distance,
            "compared_as": dtype_name(change.dtype),
        }
        for name, change in comparison.changes.items()
    }
    return {
        "steps": comparison.steps,
        "tensors": tensors,
        "second_moments": {name: change._asdict() for name, change in comparison.second_moments.items()},
        "missing": comparison.missing,
        "added": comparison.added,
        "reshaped": comparison.reshaped,
        "notes": comparison.notes,
    }


def _finite(value: Any) -> Any:
    """The value without keys whose numbers are not finite."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items() if not _is_nan(inner)}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
