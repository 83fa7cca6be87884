"""The stages of a step: planning parameters, computing what their formulas need, and stepping them by backends.

`LowPrecisionOptimizer.step` takes all parameters through them. Gradient release and DeepSpeed take some at a time, and
the precision monitor computes a step without taking it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Set

from torch import Tensor

from hf_lowprec.optim import host_steps, validation
from hf_lowprec.optim.algorithm_interface import Algorithm
from hf_lowprec.optim.backends import selection
from hf_lowprec.optim.gradients.collector import Gradients
from hf_lowprec.optim.gradients.offload import OffloadedGradients
from hf_lowprec.optim.gradients.release import GradientRelease
from hf_lowprec.optim.host_steps import HostSteps, OffloadedStep
from hf_lowprec.optim.private_torch_apis import never_compiled, without_grad
from hf_lowprec.optim.state.fp32_weights import reset_low_bits_of_other_weights
from hf_lowprec.optim.step import interrupts
from hf_lowprec.optim.step.backend_step import BackendStep
from hf_lowprec.optim.step.clipping import DelayedClipping, GradientClipping
from hf_lowprec.optim.step.fused_group import FusedGroup
from hf_lowprec.optim.step.orthogonalization import parts_to_step
from hf_lowprec.optim.step.step_plan import StepPlan
from hf_lowprec.optim.step.whole_tensor_quantities import compute_factors, compute_tensor_means, store_means
from hf_lowprec.rounding import mode_name


class StepStages(Algorithm):
    """The stages of an optimizer's step. Algorithms may extend `prepare_step` and `run_step`."""

    gradients: Gradients
    """Where gradients are before a step; may take them during the backward pass."""
    clipping: GradientClipping
    """The clipping of the coming step."""
    host_steps: HostSteps
    """Steps parameters whose states are on the host."""
    grad_norm: Tensor | None
    """Norm of the last step's gradients before clipping, an FP32 scalar on their device; None if the step did not need
    it."""
    before_part: list[Callable[[StepPlan], None]]
    """Functions that `step_part` calls with its plan, which has gradients, scalars, clip factors and tensor means."""

    def _forget_plan(self, norm_before: float = 0.0) -> None:
        """Drop what was made for the optimizer's tensors so far."""
        self._plan: StepPlan | None = None
        self.host_steps = HostSteps()
        self.clipping = (DelayedClipping if self.gradient_release else GradientClipping)(norm_before)

    def _collect_gradients(self) -> None:
        """Choose what takes gradients during the backward pass, if the arguments request it."""
        kind = Gradients
        if self.gradient_release or self.offload_gradients:
            kind = GradientRelease if self.gradient_release else OffloadedGradients
        if type(vars(self).get("gradients")) is not kind:
            self.gradients = kind(self)

    def stop_gradient_release(self) -> None:
        """Step all parameters in `step()` from now on, and leave their gradients where they are until then.

        This also ends `offload_gradients`.

        Raises:
            RuntimeError: parameters have been stepped, or gradients moved, since the last `step()`.
        """
        self.gradients.check_between_steps("stop_gradient_release()")
        self.gradients.check_take_over()
        self.gradients.stop()
        if self.gradient_release:
            self.clipping = GradientClipping()
        self.gradient_release = self.offload_gradients = False
        self.clip = "exact"
        self._collect_gradients()
        self._plan = None  # its gradients are elsewhere

    def finish_host_steps(self) -> None:
        """With `offload_states`, wait until the host has stepped all its buckets; `step` ends with this.

        With `gradient_release`, call it before you read weights or states between the backward pass and `step`.
        """
        self.host_steps.finish()

    def begin_step_of_parts(self, norm: Tensor) -> None:
        """Begin a step that takes some parameters at a time, each with `step_part`. A call of `step` ends it.

        Args:
            norm: the norm of all gradients before clipping, on all ranks; FP32 scalar on their device.
        """
        self.gradients.stepped_in_parts = True
        self.clipping.given = norm
        self.clipping.step_taken(self, norm)

    @never_compiled
    @without_grad
    def step_part(self, params: Iterable[Tensor], earlier: StepPlan | None) -> StepPlan:
        """Step some parameters, which have gradients, after `begin_step_of_parts` or in a backward pass.

        Args:
            params: the parameters.
            earlier: the plan that an earlier call for them returned.

        Returns:
            The plan of the step; `earlier` if it still fits.

        Raises:
            RuntimeError, ValueError, torch.OutOfMemoryError: as `step`.
        """
        params = list(params)
        with self._updated_plan(earlier, self.limit is not None, set(map(id, params))) as plan:
            self.prepare_step(plan)
            for call in self.before_part:
                call(plan)
            with interrupts.deferred():
                self.run_step(plan)
                for param in params:
                    param.grad = None
        return plan

    def prepare_step(self, plan: StepPlan) -> Tensor | None:
        """Compute what the formula needs in addition to tensors: scalars, clip factor, means. This changes nothing.

        Returns:
            The norm of the gradients, FP32 scalar; None if the step needs none.
        """
        for fused_group in plan.fused_groups:
            fused_group.step_scalars.compute(self.scalars)
        norm = self.clipping.clip_step(self, plan.backend_steps)  # the norm, the clip factor, whether it is skipped
        compute_factors(plan.backend_steps)
        compute_tensor_means(plan.backend_steps)
        return norm

    def run_step(self, plan: StepPlan) -> None:
        """Step the plan's parameters, after `prepare_step`."""
        for backend_step in plan.backend_steps:
            if not backend_step.fused_group.spec.orthogonalizes:
                backend_step.load_tables()
        for backend_step in plan.backend_steps:
            for entries in parts_to_step(self, backend_step):
                backend_step.run(entries)
        for fused_group in plan.fused_groups:
            store_means(fused_group)
            fused_group.count_step()
        if plan.plain_copies:
            self.finish_host_steps()
            plan.copy_back()

    def plan_step(self) -> StepPlan:
        """Return the plan of the coming step, with its gradients.

        This creates missing states and, after a change of the rounding mode, converts weights and states, see
        `convert_states`. `step` calls it, as does code that computes a step without applying it (`monitor/`). Use it in
        a `with` statement, which releases the gradients.

        Raises:
            RuntimeError: a gradient is sparse, complex or not floating point, or was written to after
                `clip_grad_norm_`; or a backend cannot run.
            ValueError: a group was given an unsupported mode, dtype or parameter.
        """
        self.check_groups()
        self.gradients.gather()
        self.clipping.match(self)
        self._plan = self._updated_plan(self._plan, clipped=self.limit is not None)
        return self._plan

    def plan_norm(self, clipped: bool) -> StepPlan:
        """Return a plan with gradients, to compute only their norm; `clipped` says whether they will be clipped."""
        self._spell_out_modes()
        self._plan = self._updated_plan(self._plan, clipped, norm_only=True)
        return self._plan

    def check_groups(self) -> None:
        """Raise ValueError if a group was given an unsupported mode, dtype or parameter."""
        self._spell_out_modes()
        reset_low_bits_of_other_weights(self)
        for k, group in enumerate(self.param_groups):
            validation.check_group(self, group, f"param group {k}")

    def _spell_out_modes(self) -> None:
        """Replace short names of rounding modes in the param groups with the long ones."""
        for group in self.param_groups:
            group["rounding"] = mode_name(group["rounding"])

    @without_grad
    def _updated_plan(
        self, plan: StepPlan | None, clipped: bool, param_ids: Set[int] | None = None, norm_only: bool = False
    ) -> StepPlan:
        """Return `plan` with the gradients of the coming step, or a new plan if anything changed."""
        validation.check_not_capturing()
        try:
            if plan is None or not plan.collect_gradients(self, clipped, param_ids, norm_only):
                self.check_groups()  # before a norm, nothing else has checked them
                self.gradients.check_no_other_takes_them()
                earlier, plan = plan, StepPlan(self, clipped, param_ids)
                if earlier is not None:
                    earlier.warn_about_changed_dtypes(self)
                plan.collect_gradients(self, clipped, param_ids, norm_only)
            if len(plan.backend_steps) < len(plan.fused_groups):
                plan.backend_steps = list(map(self._build_backend_step, plan.fused_groups))
        except BaseException:
            if plan is not None:
                plan.release()
            raise
        return plan

    def _build_backend_step(self, group: FusedGroup) -> BackendStep:
        build = functools.partial(selection.build_backend_step, self.backend)
        if self.offload_states:
            return OffloadedStep(group, self.host_steps, build, self.offload_gradients)
        return build(group)

    @property
    def elements_at_once(self) -> float:  # type: ignore[override]
        return host_steps.BUCKET_ELEMENTS if self.offload_states else math.inf

    @property
    def limit(self) -> float | None:
        """The norm to which the coming step clips gradients; None if it does not clip."""
        return self.clipping.limit(self)
