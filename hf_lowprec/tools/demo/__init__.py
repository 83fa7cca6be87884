"""The demonstration behind `hf-lowprec demo`: the same training runs in FP32, naive BF16 and hf_lowprec's BF16.

Benchmarks also use its variants, texts and training runs.
"""
