"""Code generation: trace the step of a `StepSpec` as a graph of scalar operations, then render the graph as C or Triton."""
