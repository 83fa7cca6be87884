"""The three ways to run a step (eager torch, compiled C, Triton) and the choice between them."""
