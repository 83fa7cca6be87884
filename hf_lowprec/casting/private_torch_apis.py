"""The private names of torch that casts need, each behind one function.

`tests/casting/test_torch_losses.py` fails if a version of torch changes what these functions rely on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def runs_in_checkpoint() -> bool:
    """Return whether this code runs inside `torch.utils.checkpoint`, which runs it once more in backward.

    This cannot be seen with `use_reentrant=True`. While torch's compiler traces, the answer is False.
    """
    if torch.compiler.is_compiling():
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def has_run_under_fsdp2(module: nn.Module) -> bool:
    """Return whether FSDP2 has sharded `module` and has run a forward pass since, in which it notes dtypes."""
    get_state: Any = getattr(module, "_get_fsdp_state", None)
    return get_state is not None and get_state()._is_root is not None


@cache
def trace_cross_entropy_as_function() -> None:
    """Let `torch.compile` trace an `nn.CrossEntropyLoss` that is built in `forward` as a call of `cross_entropy`.

    By itself, it records this one class as a call that no `TorchFunctionMode` sees.
    """
    import torch._dynamo

    @torch._dynamo.substitute_in_graph(  # type: ignore[arg-type]
        nn.CrossEntropyLoss, is_embedded_type=True, skip_signature_check=True
    )
    def cross_entropy_loss(*args: Any, **kwargs: Any) -> Callable[..., Tensor]:
        return lambda input, target: functional.cross_entropy(input, target, *args, **kwargs)
