"""`AveragedModel`: FP32 averages of weights (EMA, SWA) for BF16 models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

from hf_lowprec.casting import uncast_model
from hf_lowprec.optim.private_torch_apis import without_grad
from hf_lowprec.optim.sharding import is_sharded
from hf_lowprec.optim.state.fp32_weights import fp32_estimates, warn_of_weights_as_stored
from hf_lowprec.rounding import LOW_PRECISION_DTYPES


class AveragedModel(swa_utils.AveragedModel):
    """`torch.optim.swa_utils.AveragedModel` (EMA, SWA) in FP32, for a model trained in BF16.

    torch's class keeps the average in the model's dtype. In BF16, the average hardly moves: at a decay of 0.999, each
    update is a thousandth of the distance to the weight, and is mostly rounded away. This class holds an FP32 copy of
    the model (4 bytes per parameter) and averages the FP32 weights that `fp32_state_dict` returns.

    `ema.module` is an FP32 model that can be evaluated or saved. Store `ema.state_dict()` in checkpoints.

        ema = hf_lowprec.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        ...
        optimizer.step()
        ema.update_parameters(model, optimizer)

    Args:
        model: the model being trained, cast or not; it is copied.
        device: the device of the average; None means the model's device.
        avg_fn: as for torch's class. Without `avg_fn` and `multi_avg_fn`, the average is the arithmetic mean (SWA).
        multi_avg_fn: as for torch's class, such as `get_ema_multi_avg_fn(decay)`; called with one tensor at a time.
        use_buffers: average floating-point buffers too. Other buffers are copied.

    Raises:
        ValueError: the model is sharded (FSDP).
    """

    _checked = False
    """True after the first update has checked its optimizer."""

    def __init__(
        self,
        model: nn.Module,
        device: int | torch.device | None = None,
        avg_fn: Any = None,
        multi_avg_fn: Any = None,
        use_buffers: bool = False,
    ) -> None:
        if any(map(is_sharded, model.parameters())):
            raise ValueError("AveragedModel copies whole models, but this one is sharded; average checkpoints instead")
        super().__init__(model, device, avg_fn, multi_avg_fn, use_buffers)
        uncast_model(self.module)

    @without_grad
    def update_parameters(self, model: nn.Module, optimizer: Any = None) -> None:
        """Update the average with the model's weights. The first call copies them.

        The first call warns about trainable 16-bit parameters that are not in `optimizer`, or whose optimizer is from
        another library: their stored values are averaged, without compensation.

        Args:
            model: the model being trained.
            optimizer: its optimizer after the step, or accelerate's wrapper around it. As with torch's class, an FP32
                model needs none.

        Raises:
            TypeError: the model has 16-bit parameters, but no `optimizer` was passed.
            ValueError: `optimizer` has none of the model's parameters.
        """
        n_before = int(self.n_averaged)
        estimate = _float32 if optimizer is None else fp32_estimates(model, optimizer)
        if optimizer is None and any(param.dtype in LOW_PRECISION_DTYPES for param in model.parameters()):
            raise TypeError(
                "update_parameters(model) needs optimizer= for a 16-bit model, because its FP32 weights are weight + "
                "compensation; call update_parameters(model, optimizer)"
            )
        if optimizer is not None and not self._checked:
            self._checked = True
            warn_of_weights_as_stored(model, optimizer)
        average_in_place = self.multi_avg_fn or swa_utils.get_swa_multi_avg_fn()
        averaged = [*self.module.parameters(), *self.module.buffers()]
        count = len(averaged) if self.use_buffers else len(list(self.module.parameters()))
        for k, (average, tensor) in enumerate(zip(averaged, [*model.parameters(), *model.buffers()], strict=True)):
            current = estimate(tensor).to(average.device)
            is_copied_buffer = k >= count
            if n_before == 0 or is_copied_buffer or not average.is_floating_point():
                average.copy_(current)
            elif self.avg_fn is not None:
                average.copy_(self.avg_fn(average, current, n_before))
            else:
                average_in_place([average.detach()], [current], n_before)
        self.n_averaged += 1


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float() if tensor.is_floating_point() else tensor
