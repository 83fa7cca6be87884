"""What connects hf_lowprec with transformers and accelerate: the only importer of their internals."""

from hf_lowprec.integrations import former_names

former_names.install()
