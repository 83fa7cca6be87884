"""The integration with transformers and accelerate. No other package imports their internals."""

from hf_lowprec.integrations import former_names

former_names.install()
