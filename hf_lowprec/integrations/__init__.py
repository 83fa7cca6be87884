"""transformers and accelerate: the only importer of their internals."""
