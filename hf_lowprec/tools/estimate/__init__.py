"""Estimate the memory of training a model from its configuration alone, for `hf-lowprec estimate`."""
