"""Other packages' AdamW for BF16 weights."""
