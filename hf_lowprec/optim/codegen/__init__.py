"""Compiled code from the one formula: record the step as a graph, then write it as C or Triton."""
