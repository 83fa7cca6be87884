"""Checkpoints of Trainer: what is written into them, whether they are whole, and which one is resumed from."""

import transformers.trainer  # noqa: F401  (first: importing it runs code that imports modules of this folder)
