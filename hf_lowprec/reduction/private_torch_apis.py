"""The private attributes of torch that reductions need, each behind one function.

torch has no public API for these. `tests/reduction/test_private_torch_apis.py` fails if a version of torch drops one.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"


def names_ignored_by_ddp(module: nn.Module) -> Collection[str]:
    """Names of the parameters and buffers below `module` that DDP was told not to synchronize."""
    return getattr(module, _IGNORED_BY_DDP, ())


def forget_comm_hooks(model: DistributedDataParallel) -> None:
    """Empty the list in which `model` records its communication hooks, so that it accepts another one."""
    model._comm_hooks.clear()


def version_of(tensor: Tensor) -> int:
    """How often `tensor`, or the storage that it is a view of, was changed in place."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Whether autograd sees `tensor` as a view, which shares the version of its base."""
    return tensor._is_view()
