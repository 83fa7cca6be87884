"""Gradients before a step: in `param.grad`, or stepped or moved to the host during the backward pass."""
