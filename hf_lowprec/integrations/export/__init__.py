"""Writes trained models as standard folders that `from_pretrained` loads: from memory, or from a checkpoint."""
