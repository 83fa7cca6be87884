"""The checks of `hf-lowprec doctor`, and the layers and the short training run that they need."""
