"""The base class of every algorithm's optimizer: param groups, steps, clipping and checkpoints.

An algorithm defines its states, its scalars and its formula (see `Algorithm`). Rounding, state dtypes, backends and
checkpoints are written here and below, once for all algorithms.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from hf_lowprec.optim import arguments, param_groups, validation
from hf_lowprec.optim.algorithm_interface import ParamGroup
from hf_lowprec.optim.arguments import Shared
from hf_lowprec.optim.backends import selection
from hf_lowprec.optim.gradients.collector import Gradients, collector_of
from hf_lowprec.optim.param_groups import params_of
from hf_lowprec.optim.private_torch_apis import never_compiled, undecorated, without_grad
from hf_lowprec.optim.state.fp32_weights import zero_low_bits_of_other_weights
from hf_lowprec.optim.state.saved_formats import NORM_BEFORE, to_saved_form
from hf_lowprec.optim.state.state_dict import check_and_load
from hf_lowprec.optim.step import interrupts
from hf_lowprec.optim.step_stages import StepStages
from hf_lowprec.rounding.attached_low_bits import low_bits_to_save, restore_saved_low_bits


class LowPrecisionOptimizer(StepStages):
    """Base of the optimizers that train BF16 (or FP16) weights as accurately as FP32 ones.

    All arithmetic is FP32; parameters and states are stored in their own dtypes and rounded once, at the end of the
    update. FP32 parameters are updated with the plain FP32 algorithm and FP32 states.

    Arguments and group options may be text, see `Argument.value_of`; attributes and groups hold Python values.

    Args:
        params: parameters or groups, as for any `torch.optim.Optimizer`.
        defaults: the algorithm's own hyperparameters; its constructor passes `locals()`.
        rounding: `"split"` (an int16 remainder stores the rest of the exact FP32 weight), `"kahan"` (a BF16
            compensation stores the rounding error of each update), `"stochastic"` or `"sr"` (unbiased, no extra state)
            or `"nearest"`. FP16 parameters need `"kahan"` or `"nearest"`. This argument and the next four may also be
            set per parameter group. Groups hold the long name.
        state_dtype: the dtype of the states of low-precision parameters: `torch.bfloat16`, `torch.float32` or
            `torch.int8` (codes of 8 bits, and a scale for each 32 elements of a row), or a mapping from state name to
            dtype; None means BF16. With `torch.int8`, states that do not average over steps stay in BF16, as do all
            states of parameters whose rows are not multiples of 32 elements.
        state_rounding: `"stochastic"` or `"nearest"` (the papers' textbook algorithms), for BF16 states and the
            compensation. States in 8 bits are always rounded stochastically.
        seed: seed of the random bits. Replicas must share it.
        first_parameter: index of the first parameter for the random bits; later parameters count up from there. The
            default is 0, but optimizers with a single parameter are numbered in the order of construction; pass 0 to
            make them draw the same bits. Optimizers with several parameters (for example, one optimizer per block) all
            start at 0 and therefore draw the same bits. To give each its own bits, pass the total number of parameters
            in the optimizers before it: `first_parameter=sum(map(len, blocks[:k]))`, where `blocks` are the lists of
            parameters.
        backend: `"auto"`, `"triton"` (GPU), `"native"` (CPU) or `"eager"`.
        error_feedback: whether the momentum lets the next steps add what stochastic rounding takes from a weight, so
            that a weight stays within about a spacing of the exact one, however many steps there are. None means
            wherever possible: with `rounding="stochastic"` and an update that is linear in a momentum. False means
            nowhere, as in the papers.
        max_grad_norm: clip by the global FP32 norm of all gradients inside the step, without modifying `p.grad`. None
            does not clip.
        skip_nonfinite: skip steps whose gradient norm is not finite, leaving weights and states unchanged;
            `skipped_steps` counts them.
        gradient_release: step parameters during the backward pass, a few at a time, and free their gradients, so that
            the gradients of the whole model never exist at once; `step()` steps the rest. Weights and states equal
            those of the ordinary step bit for bit. See `gradients/release.py` for what it excludes.
        clip: with `"exact"`, `max_grad_norm` clips by the norm of the step's own gradients. With `"delayed"`, which
            needs `gradient_release`, it clips by the norm of the step before; the first step is not clipped.
        offload_states: keep the states of parameters on a GPU in host memory, and step them there, see `host_steps.py`.
            Weights and states equal those of the ordinary step bit for bit. This needs an algorithm that steps each
            element by itself.
        offload_gradients: move gradients to host memory during the backward pass, as soon as they are final, and free
            them on the GPU; needs `offload_states`. On the host, they are added up over micro-batches and wait for
            `step()`, which frees them, so that `max_grad_norm` clips by the norm of the step's own gradients.

    Raises:
        TypeError: a keyword is unknown. For torch's `foreach`, `fused`, `capturable` and `differentiable`, and for a
            few keywords of other libraries, the message says why it is not needed and what to use instead.
        ValueError: a hyperparameter, mode, dtype or parameter is not supported.
        RuntimeError: `backend` cannot run here.
    """

    def __init__(self, params: Any, defaults: ParamGroup, **shared: Unpack[Shared]) -> None:
        cls = type(self)
        for name in (name for name in shared if name not in arguments.SHARED):
            hint = arguments.hint(name, arguments.keywords(cls))
            raise TypeError(f"{cls.__name__} got an unexpected keyword argument {name!r}{hint}")
        own = {name: value for name, value in defaults.items() if name not in ("self", "params", "shared", "__class__")}
        shared_defaults = {name: own.get(name, argument.default) for name, argument in arguments.SHARED.items()}
        values = arguments.values_of(cls, {**own, **shared_defaults, **shared})
        for name in arguments.EXECUTION_ARGUMENTS:
            setattr(self, name, values.pop(name))
        arguments.check_execution_arguments(self)
        selection.check_can_run(self.backend)
        self.skipped_before = 0
        self.grad_norm, self.before_part = None, []
        self._forget_plan()
        self.gradients = Gradients(self)  # `add_param_group` reads it, which torch calls
        if is_first := values["first_parameter"] is None:
            del values["first_parameter"]
        super().__init__(params, values)
        if is_first:
            param_groups.number_if_single(self)
        self._collect_gradients()

    @never_compiled
    @without_grad
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform a single optimization step. Ctrl-C and other signals are handled before or after it, never during it.

        With `gradient_release`, this steps the parameters that the backward pass has left, and ends the step.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: a gradient is sparse, complex or not floating point, or was written to after
                `clip_grad_norm_`; or the memory of a tensor was freed. Weights and states are left unchanged.
            ValueError: a group was given an unsupported mode or dtype. Weights and states are left unchanged.
            torch.OutOfMemoryError: weights and states are left unchanged, so the step can be repeated, unless memory
                runs out after the first matrix of `Muon`, or the first chunk of the `eager` backend. The largest comes
                first, so this happens only if other code takes memory at the same time, or if memory is fragmented.
                Then some parameters have been stepped and others not, and training must resume from a checkpoint.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        param_groups.reset_numbers()
        if not self.gradients.stepped_in_parts:
            with self.plan_step() as plan:  # check groups, reuse or build the plan, collect gradients, choose backends
                norm = self.prepare_step(plan)
                with interrupts.deferred():
                    self.run_step(plan)
                    self.finish_host_steps()
                    self.clipping.step_taken(self, norm)
        self.gradients.end_step()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """`torch.amp.GradScaler` reads this at the beginning of its `step`, before it looks for gradients.

        Raises:
            RuntimeError: gradients are taken during the backward pass, when they are scaled.
        """
        if collector := collector_of(self):
            raise RuntimeError(
                f"GradScaler scales the loss and divides gradients in its step, but {collector.argument} has taken "
                "gradients during the backward pass; BF16 needs no loss scaling, so remove the scaler"
            )
        return False

    @property
    def skipped_steps(self) -> int:
        """The number of steps that `skip_nonfinite` has skipped, including those before a resume.

        Reading it synchronizes with the device.
        """
        return self.skipped_before + int(self.clipping.skipped_steps or 0)

    @never_compiled
    def global_grad_norm(self) -> Tensor:
        """Compute the global norm of the gradients before clipping.

        The next step reuses the norm if the gradients have not changed.

        Returns:
            An FP32 scalar on the gradients' device. The call is asynchronous: it does not synchronize with the device.

        Raises:
            RuntimeError: gradients were written to after `clip_grad_norm_`.
        """
        return self.clipping.compute_norm(self, None).norm

    @never_compiled
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients by their global norm inside the next step, without modifying `p.grad`.

        Call it immediately before `step()`. It applies only to the current gradients: new ones, such as those computed
        after `zero_grad()`, are not clipped. Writing to the gradients between this call and `step()` is an error unless
        they are zeroed in place, because `torch.nn.utils.clip_grad_norm_` would already have scaled the old values. A
        second call clips the result of the first.

        Args:
            max_norm: overrides the optimizer's `max_grad_norm`; infinity does not clip.

        Returns:
            The norm before clipping, an FP32 scalar on the gradients' device. The call is asynchronous: it does not
            synchronize with the device.

        Raises:
            RuntimeError: gradients were changed or added after an earlier call; or they are released during the
                backward pass, and `clip` is not "delayed". With "delayed", the remaining parameters are stepped.
            ValueError: `max_norm` is not a number above 0; or with `clip="delayed"`, it is not `max_grad_norm`.
        """
        if max_norm != math.inf:
            arguments.Argument(float, default=1.0, gt=0).check("max_norm", max_norm)
        return self.clipping.clip_grad_norm_(self, max_norm)

    @never_compiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as `torch.optim.Optimizer.zero_grad` does."""
        self.clipping.pending = None
        self.finish_host_steps()  # in case a step was not ended
        undecorated(torch.optim.Optimizer.zero_grad)(self, set_to_none)
        self.gradients.zero(set_to_none)

    @never_compiled
    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a param group, as `torch.optim.Optimizer.add_param_group` does. An invalid group is not added.

        Raises:
            ValueError: a hyperparameter, mode, dtype or parameter is not supported, or there are no `params`.
        """
        if isinstance(param_group, dict) and param_group.get("params") is None:
            raise ValueError(f"param group {len(self.param_groups)} has no 'params', the parameters to train")
        undecorated(torch.optim.Optimizer.add_param_group)(self, param_group)
        try:
            group = self.param_groups[-1]
            group.update(arguments.values_of(type(self), group))
            where = f"param group {len(self.param_groups) - 1}"
            validation.check_new_group(self, group, where)
        except Exception:
            self.param_groups.pop()
            raise
        self.gradients.watch_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, as `torch.optim.Optimizer.state_dict` does, with dtypes as strings.

        Every checkpoint format can store it. Each group's `state_rounding` is a JSON object that holds its value, the
        name of the `optimizer` and the `format`. Low bits of weights that have not been stepped yet are saved under the
        key `low_bits`.

        Raises:
            RuntimeError: gradient release has stepped parameters since the last `step()`.
        """
        self._spell_out_modes()
        self.gradients.check_between_steps("state_dict()")
        state_dict = super().state_dict()
        if self.clip == "delayed":
            state_dict["param_groups"][0][NORM_BEFORE] = float(self.clipping.norm_before)
        return to_saved_form(self, state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the same algorithm and parameter shapes.

        State of torch's Adam, AdamW, RAdam, SGD and Muon, and of transformers' Adafactor, is converted; a warning says
        so.

        As in torch, the saved options replace this optimizer's; a warning names those that differ. This optimizer keeps
        its rounding mode: states of another mode are converted before the next step. It keeps a `state_dtype` other
        than None, and with 8 bits its `state_rounding`: saved states are then converted and rounded to nearest;
        otherwise, they keep their dtypes. Compensations and remainders are copied; other states may share memory with
        `state_dict`, as in torch. Keys that an earlier version did not save get their defaults.

        Raises:
            ValueError: the state dict does not fit, or a newer version saved it. The optimizer is left unchanged.
        """
        self._spell_out_modes()
        self.finish_host_steps()
        for note in check_and_load(self, state_dict, super().load_state_dict):
            warnings.warn(note, RuntimeWarning, stacklevel=2)
        self.clipping.norm_before, *_ = [group.pop(NORM_BEFORE, 0.0) for group in self.param_groups]

    def __getstate__(self) -> dict[str, Any]:
        self.gradients.check_between_steps("copying or pickling")
        states = self.state.copy()
        zero_low_bits_of_other_weights(states, ((param, param) for param in params_of(self)))
        return {
            **super().__getstate__(),
            NORM_BEFORE: float(self.clipping.norm_before),
            "state": states,
            # For weights not stepped yet: deep copies of parameters lose their attributes.
            "low_bits": [*map(low_bits_to_save, params_of(self))],
            "skipped_before": self.skipped_steps,
            **{name: getattr(self, name) for name in (*arguments.EXECUTION_ARGUMENTS, "grad_norm")},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        norm_before, low_bits = state.pop(NORM_BEFORE, 0.0), state.pop("low_bits", ())
        super().__setstate__(state)
        for param, kept in zip(params_of(self), low_bits, strict=False):
            if kept is not None:
                restore_saved_low_bits(param, kept)
        self._forget_plan(norm_before)
        vars(self).setdefault("before_part", [])
        self._collect_gradients()
        self.gradients.states_were_loaded()
