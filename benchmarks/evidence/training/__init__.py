"""The models, data and ways to train of all experiments."""
