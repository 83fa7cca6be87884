"""What `prepare_accelerator` changes on an `accelerate.Accelerator`."""
