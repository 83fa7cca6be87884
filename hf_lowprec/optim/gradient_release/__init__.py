"""Steps parameters during the backward pass, so that their gradients can be freed."""
