"""Optimizer states in host memory: gradients travel to the host, are stepped there, and new weights travel back."""
