"""The demonstration behind `hf-lowprec demo`: the same training in FP32, in naive BF16 and in ours, on real text.

Benchmarks use its variants, its text and its training runs, too.
"""
