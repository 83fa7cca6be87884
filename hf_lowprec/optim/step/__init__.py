"""One optimizer step. It takes this path through the files, beginning with `step()` in `optim/optimizer.py`:

1. `step_plan.py`: reuse the `StepPlan` of the last step if nothing has changed (`fingerprint.py`), else build one (a
   `ParamEntry` per parameter, a `FusedGroup` per `KernelSpec` of `kernel_spec.py` and device); collect the gradients.
2. `backends/selection.py`: build a `BackendStep` (`backend_step.py`) per fused group of a new plan.
3. `scalars.py`: learning rates, bias corrections and step counts of all entries, on the host or on the device.
4. `clipping.py`: the gradients' norm, if it is needed; the clip factor; whether the step is skipped.
5. `whole_tensor_quantities.py`: the means over whole tensors that an algorithm needs.
6. `interrupts.py` makes signals wait from here on. `backends/*.py`: `BackendStep.run` takes the pointers of
   `fused_group.py` and the tables of `segments.py`, and runs `fused_step` (`fused_step.py`) or a kernel generated from
   it. If an algorithm orthogonalizes matrices, `orthogonalization.py` does so right before, for one matrix or a few
   small ones at a time. Ranks share this work (`matrix_owners.py`, `sharing_ranks.py`).
7. Step counts are incremented, contiguous copies are copied back, and `StepPlan.release` releases the gradients.

With `gradient_release`, `optim/gradients/release.py` takes the same path for some parameters at a time, during the
backward pass, and `DelayedClipping` of `clipping.py` clips.
"""
