"""`prepare_accelerator`, and its checks of an `accelerate.Accelerator` and of its ranks."""
