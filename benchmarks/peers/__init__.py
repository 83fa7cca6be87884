"""Other packages' AdamW for BF16 weights, and the parts of `benchmarks/compare_peers.py`, one file per measurement."""
