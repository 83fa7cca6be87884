"""One optimizer step. Its path through the files, beginning with `step()` in `optim/optimizer.py`:

1. `step_plan.py`: reuse the `StepPlan` of the last step if nothing has changed, else build one (a `ParamEntry` per
   parameter, a `FusedGroup` per `StepSpec` of `kernel_spec.py` and device); collect the gradients.
2. `backends/selection.py`: build a `BackendStep` (`backend_step.py`) per fused group of a new plan.
   `graph_capture.py`: check that a CUDA graph, if one is being captured, can hold the step.
3. `scalars.py`: learning rates, bias corrections and step counts of all entries, on the host or on the device.
4. `clipping.py`: the gradients' norm, if it is needed; the clip factor; whether the step is skipped.
5. `whole_tensor_quantities.py`: what an algorithm needs of whole tensors, a mean or an orthogonalized matrix.
6. `backends/*.py`: `BackendStep.run` takes the pointers of `fused_group.py` and the tables of `segments.py`, and runs
   `fused_step` (`fused_step.py`) or a kernel made of it. `interrupts.py` makes signals wait from here on.
7. Step counts go up, contiguous copies are copied back, and `StepPlan.release` lets go of the gradients.
"""
