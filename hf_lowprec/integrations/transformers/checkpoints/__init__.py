"""Checkpoints of Trainer: what is written into them, whether they are intact, and which one is resumed from."""
