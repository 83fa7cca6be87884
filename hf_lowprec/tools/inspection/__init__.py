"""`hf-lowprec inspect`: what the files of one checkpoint, or of two checkpoints of a model, say about precision."""
