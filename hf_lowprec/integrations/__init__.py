"""What connects hf_lowprec with transformers and accelerate: the only importer of their internals."""
