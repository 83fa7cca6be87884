"""Steps on GPUs with generated Triton kernels."""
