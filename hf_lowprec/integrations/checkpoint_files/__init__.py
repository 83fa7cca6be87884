"""Read what checkpoints contain, tensor by tensor and without a model."""
