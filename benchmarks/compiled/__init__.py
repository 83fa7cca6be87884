"""Kernels compiled without a GPU: compile them, read their machine code, predict their speed.

`kernels` says what is compiled, `sass` and `amdgcn` read what NVIDIA's and AMD's compilers make of it, `control_flow`
finds the instructions that ordinary inputs execute, and `gpus` and `speed_limits` predict how fast a GPU executes them.
"""
