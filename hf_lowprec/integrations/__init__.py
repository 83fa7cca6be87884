"""Connections to transformers and accelerate; no other package imports their internals."""

from hf_lowprec.integrations import former_names

former_names.install()
