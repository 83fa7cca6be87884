"""The checks of `hf-lowprec doctor`, and the short training run that they need."""
