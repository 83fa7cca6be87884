"""The three backends that run a step (eager torch, compiled C, Triton), and the choice between them."""
