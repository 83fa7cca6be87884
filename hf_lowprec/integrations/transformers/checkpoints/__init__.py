"""Checkpoints of Trainer: what they contain, whether they are complete, and which one a run resumes from."""

import transformers.trainer  # noqa: F401  (first: importing it runs code that imports modules of this folder)
