"""The integration with transformers and accelerate. No other package imports their internals."""
