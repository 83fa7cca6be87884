"""Support for `TrainingArguments(optim=…)`: additions to Trainer, the callback, checkpoints."""

import transformers.training_args  # noqa: F401  (first: importing it runs code that imports modules of this folder)
