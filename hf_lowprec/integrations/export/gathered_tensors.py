"""Lets rank 0 write tensors that are sharded over several ranks, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from hf_lowprec.integrations.export.model_folder import PendingTensor
from hf_lowprec.reduction.collective_errors import explain_lost_rank

_DONE, _FAILED = -1, -2
"""The numbers that rank 0 announces in place of a tensor's."""


def write_on_first_rank(
    tensors: Mapping[str, PendingTensor], device: torch.device, write: Callable[[Mapping[str, PendingTensor]], None]
) -> None:
    """Call `write(tensors)` on rank 0, and let the other ranks compute each tensor with it until it has finished.

    Only rank 0 knows which tensor it needs next, so it announces the tensor's number to the others before it computes
    it. Every rank must call this function, with the same names.

    Args:
        tensors: tensors that all ranks compute together.
        device: the device on which ranks communicate.
        write: writes the tensors, computing each one any number of times, in any order.

    Raises:
        RuntimeError: `write` failed on rank 0, where its own exception is raised, or a rank was lost.
    """
    group = dist.group.WORLD
    assert group is not None
    computations = [pending.compute for pending in tensors.values()]

    def announce(number: int) -> int:
        message = torch.tensor(number, device=device)
        with explain_lost_rank(group, "saving a model"):
            dist.broadcast(message, src=0)
        return int(message)

    if dist.get_rank() == 0:

        def compute_together(number: int) -> torch.Tensor:
            announce(number)
            return computations[number]()

        pending = {
            name: tensor._replace(compute=lambda number=number: compute_together(number))  # type: ignore[misc]
            for number, (name, tensor) in enumerate(tensors.items())
        }
        try:
            write(pending)
        except BaseException:
            announce(_FAILED)
            raise
        announce(_DONE)
        return
    while (number := announce(0)) >= 0:
        computations[number]()
    if number == _FAILED:
        raise RuntimeError("rank 0 could not save the model; its error says why")
