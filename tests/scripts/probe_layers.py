"""How many of the layers of `hf-lowprec doctor` run here, how many do not, and the largest error of the former."""

import torch

from hf_lowprec.tools.doctor.layers import probe_layers

found, unsupported = probe_layers(torch.device("cpu"))
print(len(found), len(unsupported), max(error for probe in found for error in probe.errors.values()))
