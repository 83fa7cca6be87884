"""What `hf-lowprec estimate` does: the memory of training a model, from its configuration alone."""
