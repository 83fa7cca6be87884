"""State dicts that an earlier commit wrote: one for each algorithm and mode, in `tests/golden/checkpoints`.

They are written together with the recording, and hold the weights, the state dict after three steps, and nothing else.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from tests.golden.exact import digest
from tests.golden.steps import SMALL, Case, Training

FOLDER = Path(__file__).with_name("checkpoints")
CASE = Case(tensors=SMALL)


def path(algorithm: str, mode: str, folder: Path = FOLDER) -> Path:
    return folder / f"{algorithm.lower()}_{mode}.pt"


def write(algorithm: str, mode: str, folder: Path = FOLDER) -> None:
    """Train for three steps and save."""
    training = Training(algorithm, mode, "eager", CASE)
    training.run(range(1, 4))
    saved = {"weights": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    torch.save(saved, path(algorithm, mode, folder))


def record(algorithm: str, mode: str, backend: str, folder: Path = FOLDER) -> dict[str, Any]:
    """Digests right after loading the saved file, and after one more step; loading it warns of nothing."""
    training = Training(algorithm, mode, backend, CASE)
    saved = torch.load(path(algorithm, mode, folder), weights_only=True)
    training.model.load_state_dict(saved["weights"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.optimizer.load_state_dict(saved["optimizer"])
    loaded = {**training.digests(), "step": digest(state["step"] for state in training.optimizer.state.values())}
    training.step(4)
    return {"loaded": loaded, "after one more step": training.digests()}
