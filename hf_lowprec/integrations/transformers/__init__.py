"""What `TrainingArguments(optim=…)` starts: the Trainer's additions, its callback, its checkpoints."""
