"""Support for `TrainingArguments(optim=…)`: additions to Trainer, the callback, checkpoints."""
