"""Model folders of FP32 weights from the files of checkpoints."""
