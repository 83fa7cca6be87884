"""The changes that `prepare_accelerator` makes to an `accelerate.Accelerator`."""
