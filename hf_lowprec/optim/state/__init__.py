"""The optimizer state of each parameter: how it is created, saved, loaded and converted."""
