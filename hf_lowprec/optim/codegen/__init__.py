"""Trace the step of a `StepSpec` as a graph of scalar operations, and render the graph as C or Triton."""
