"""The optimizer shell every algorithm shares: groups, lazy state, one call per step_spec and step.

An algorithm is a subclass that gives its states, its host-side scalars and its formula; rounding, state dtypes,
backends and checkpoints live here and below, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_lowprec.optim import parameter_numbers as numbering
from hf_lowprec.optim import state_dict as checkpoint
from hf_lowprec.optim import validation
from hf_lowprec.optim.algorithm import Algorithm, ParamGroup
from hf_lowprec.optim.backends import selection as backends
from hf_lowprec.optim.backends import triton as launch
from hf_lowprec.optim.sharding import sum_over_shards
from hf_lowprec.optim.shared_keywords import signature
from hf_lowprec.optim.step import clipping, interrupts, per_tensor
from hf_lowprec.optim.step.clipping import PendingClip
from hf_lowprec.optim.step.plan import Plan


class LowPrecisionOptimizer(Algorithm):
    """Base of the optimizers that train BF16 (or FP16) weights as accurately as FP32 ones.

    All arithmetic is FP32; parameters and states are stored in their own dtypes and rounded once, at the end of the
    update. FP32 parameters get the plain FP32 algorithm with FP32 states.

    Args:
        params: parameters or groups, as for any `torch.optim.Optimizer`.
        defaults: the algorithm's own hyperparameters.
        rounding: `"kahan"` (a BF16 compensation carries what the weight could not hold), `"stochastic"` (unbiased, no
            extra state; BF16 parameters only) or `"nearest"`. May be set per parameter group, as may the next three.
        state_dtype: `torch.bfloat16` or `torch.float32` for the states of low-precision parameters, or a mapping from
            state name to dtype; None means BF16.
        state_rounding: `"stochastic"` or `"nearest"` (the papers' textbook algorithms), for BF16 states and the
            compensation.
        seed: seed of the random bits. Replicas must share it.
        first_parameter: number of the first parameter in the random stream; the following ones count up. Default: 0,
            except that optimizers of a single parameter are numbered in the order of construction. Pass 0 to give them
            equal bits. Optimizers of several parameters, as one per block, all start at 0 and draw the same bits; to
            give each its own, pass the number of parameters in the optimizers before it:
            `first_parameter=sum(map(len, blocks[:k]))`, `blocks` being the lists of parameters.
        backend: `"auto"`, `"triton"` (GPU), `"native"` (CPU) or `"eager"`.
        capturable: keep step counts on the device, so that a step can be captured in a CUDA graph; a learning rate
            that is to change between replays must be a tensor there.
        max_grad_norm: clip by the global norm of all gradients, FP32, inside the step; gradients are left as they are.
            None does not clip.
        skip_nonfinite: leave everything as it is in a step whose gradients have a non-finite norm; `skipped_steps`
            counts them.

    Raises:
        TypeError: a keyword is unknown; torch's `foreach`, `fused` and `differentiable` are not needed.
        ValueError: a hyperparameter, mode, dtype or parameter is not supported.
        RuntimeError: `backend` cannot run here.
    """

    first_step_checks: ClassVar[list[Callable[[LowPrecisionOptimizer], None]]] = []
    """Called before the first step after construction or loading, for layers above, which know of models and ranks.

    They may warn, not raise.
    """

    def __init_subclass__(cls) -> None:
        """Show the shared keywords in the signature of an algorithm that takes them as `**shared`."""
        cls.__signature__ = signature(cls, LowPrecisionOptimizer)  # type: ignore[attr-defined]

    def __init__(
        self,
        params: Any,
        defaults: ParamGroup,
        *,
        rounding: str = "kahan",
        state_dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
        state_rounding: str = "stochastic",
        seed: int = 0,
        first_parameter: int | None = None,
        backend: str = "auto",
        capturable: bool = False,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        **unexpected: Any,
    ) -> None:
        validation.check_keywords_of(type(self), unexpected)
        backends.check(backend)
        validation.check_execution(capturable, max_grad_norm, skip_nonfinite)
        self.backend = backend
        self.capturable = capturable
        self.max_grad_norm = max_grad_norm
        self.skip_nonfinite = skip_nonfinite
        self.grad_norm: Tensor | None = None
        """Norm of the last step's gradients before clipping, FP32 on their device, where it was needed."""
        self._reset()
        defaults = {
            **defaults,
            "rounding": rounding,
            "state_dtype": dict(state_dtype) if isinstance(state_dtype, Mapping) else state_dtype,
            "state_rounding": state_rounding,
            "seed": seed,
        }
        super().__init__(params, defaults | ({} if first_parameter is None else {"first_parameter": first_parameter}))
        if first_parameter is None and [len(group["params"]) for group in self.param_groups] == [1]:
            execution = (backend, capturable, max_grad_norm, skip_nonfinite)
            kind = (type(self), rounding, str(state_dtype), state_rounding, seed, isinstance(defaults["lr"], Tensor))
            if number := numbering.next_number((*kind, *execution)):
                self.defaults["first_parameter"] = self.param_groups[0]["first_parameter"] = number

    def _reset(self) -> None:
        self._plan: Plan | None = None
        self._pending: PendingClip | None = None
        self._skipped: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one optimizer step. Ctrl-C and other signals are handled before it or after it, never in between.

        Args:
            closure: re-evaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: a gradient is sparse, complex or not floating point, or was written to after
                `clip_grad_norm_`; or the memory of a tensor was freed. Nothing is changed then.
            ValueError: a group was given an unsupported mode or dtype; nothing is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        numbering.start_anew()
        with self.next_step() as plan, interrupts.deferred():
            for fused_group in plan.fused_groups:
                backends.resolve(self.backend, fused_group).run(fused_group)
            for fused_group in plan.fused_groups:
                fused_group.count()
            plan.copy_back()
            self.grad_norm = plan.norm
            if self._pending is not None:
                self._pending.taken = True
            if self.capturable:  # a graph that is replayed writes to gradients without changing their versions
                self._pending = None
            if plan.norm is not None and self.skip_nonfinite:
                if self._skipped is None:
                    self._skipped = torch.zeros((), dtype=torch.int64, device=plan.norm.device)
                self._skipped += ~plan.norm.isfinite()  # in place, for a graph that is replayed
        return loss

    @property
    def skipped_steps(self) -> int:
        """The number of steps that `skip_nonfinite` has left out. Reading it waits for the device."""
        return 0 if self._skipped is None else int(self._skipped)

    def global_grad_norm(self) -> Tensor:
        """The global norm of the gradients, before clipping.

        The next step does not compute it again, as long as it finds the same gradients.

        Returns:
            An FP32 scalar on the gradients' device. The device is not waited for.

        Raises:
            RuntimeError: gradients were written to after `clip_grad_norm_`.
        """
        pending, _ = self._clip_ahead(None)
        assert pending.norm is not None
        return pending.norm

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients by their global norm, in the step that uses them; they are not rewritten.

        Call it last before `step()`. It applies to the gradients of now: new ones, as after `zero_grad()`, are not
        clipped. Gradients that are written to in between are an error, unless they were zeroed in place, because
        `torch.nn.utils.clip_grad_norm_` would have scaled what was there before. A second call clips what the first one
        leaves.

        Args:
            max_norm: wins over the optimizer's `max_grad_norm`; infinity does not clip.

        Returns:
            The norm before clipping, an FP32 scalar on the gradients' device. The device is not waited for.

        Raises:
            RuntimeError: gradients were changed or added after an earlier call.
            ValueError: `max_norm` is not a number above 0.
        """
        if max_norm != math.inf:
            validation.check_max_norm("max_norm", max_norm)
        _, norm = self._clip_ahead(max_norm)
        return norm

    def _clip_ahead(self, max_norm: float | None) -> tuple[PendingClip, Tensor]:
        """Clip the coming step by `max_norm`, or None to compute the norm only; also the norm before."""
        earlier = self._still_pending()
        if max_norm is not None and (earlier is None or earlier.limit is None):
            for group in self.param_groups:
                clipping.give_own_views(group["params"])
        self._pending = pending = PendingClip(self._gradients(), earlier, max_norm)
        try:
            with self.next_step(norm_only=True) as plan:
                assert plan.norm is not None
                return pending, pending.finish(plan.norm, launch.capturing())
        except BaseException:
            self._pending = earlier
            raise

    def _gradients(self) -> list[Tensor]:
        maybe = [param.grad for group in self.param_groups for param in group["params"]]
        return [grad for grad in maybe if grad is not None]

    def _still_pending(self) -> PendingClip | None:
        """What is pending for the gradients of now; forgotten if it belongs to others."""
        if self._pending is not None and not self._pending.applies_to(self._gradients()):
            self._pending = None
        return self._pending

    @property
    def limit(self) -> float | None:
        """What the coming step clips by; None if it does not."""
        pending = None if self._pending is None else self._pending.limit
        limit = self.max_grad_norm if pending is None else pending
        return None if limit == math.inf else limit

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `torch.optim.Optimizer.zero_grad`."""
        self._pending = None
        super().zero_grad(set_to_none)

    @contextmanager
    def next_step(self, norm_only: bool = False) -> Iterator[Plan]:
        """The coming step, ready to be run; creates missing states and changes nothing else.

        Args:
            norm_only: compute the norm of the gradients, and nothing more of what the step needs.

        Raises:
            RuntimeError: a gradient is sparse, complex or not floating point, or was written to after
                `clip_grad_norm_`; or a backend cannot run.
            ValueError: a group was given an unsupported mode, dtype or parameter.
        """
        for k, group in enumerate(self.param_groups):
            validation.check_group(self, group, f"param group {k}")
        pending = self._still_pending()
        plan = self._plan
        try:
            if plan is None or not plan.collect(self):
                backends.check_not_capturing()
                for check in self.first_step_checks if plan is None else ():
                    check(self)
                plan = self._plan = Plan(self)
                plan.collect(self)
            resolved = [backends.resolve(self.backend, fused_group) for fused_group in plan.fused_groups]
            backends.check_capture(plan.fused_groups, self.capturable)
            for fused_group in plan.fused_groups:
                fused_group.prepare(self.scalars)
            plan.norm = None
            if norm_only or self.limit is not None or self.skip_nonfinite:
                known = pending is not None and pending.captured == launch.capturing()
                if pending is not None and known and not norm_only and pending.expected is None:
                    plan.norm = pending.norm
                else:
                    pairs = zip(resolved, plan.fused_groups, strict=True)
                    sums = [
                        sum_over_shards(backend.square_sum(fused_group), fused_group.sharding)
                        for backend, fused_group in pairs
                    ]
                    plan.norm = clipping.global_norm(sums)
                    if pending is not None and pending.expected is not None:
                        pending.check(plan.norm)
                if not norm_only:
                    factor = pending.factor if pending is not None and known else None
                    plan.limit(self.limit, factor, self.skip_nonfinite)
            if not norm_only:
                for backend, fused_group in zip(resolved, plan.fused_groups, strict=True):
                    per_tensor.compute(self, fused_group, backend.tensor_sums)
            yield plan
        finally:
            if plan is not None:
                plan.release()

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group, as `torch.optim.Optimizer.add_param_group`; a group that is refused leaves no trace.

        Raises:
            ValueError: a hyperparameter, mode, dtype or parameter is not supported.
        """
        super().add_param_group(param_group)
        try:
            where = f"param group {len(self.param_groups) - 1}"
            validation.check_new_group(self, self.param_groups[-1], where)
        except Exception:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.Optimizer.state_dict`; dtypes in it are names, which every checkpoint format can hold.

        Each group's `state_rounding` is a JSON object of its value, the name of the `optimizer` and the `format`.
        """
        return checkpoint.saved_form(self, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the same algorithm, rounding mode and parameter shapes; every state keeps its saved
        dtype.

        The options saved in it replace those of this optimizer, as in torch; a warning names those that differ. Keys
        that it lacks, as an earlier version did not have them, get their defaults.

        Raises:
            ValueError: the state dict does not fit, or a newer version saved it; nothing is changed then.
        """
        final: list[dict[str, Any]] = []
        changed: list[str] = []

        def check(optimizer: torch.optim.Optimizer, incoming: dict[str, Any]) -> dict[str, Any]:
            final.append(checkpoint.checked(self, incoming))
            changed.extend(checkpoint.changed_options(self, final[0]["param_groups"]))
            return final[0]

        # Torch's loader casts states to the parameter's dtype; registered last, this sees what it will load.
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        checkpoint.restore_dtypes(self, final[0])
        checkpoint.warn_of_changes(self, changed)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            **{name: getattr(self, name) for name in (*validation.EXECUTION, "grad_norm")},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()
        for group in self.param_groups:
            group.setdefault("maximize", False)
