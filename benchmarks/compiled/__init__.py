"""Kernels compiled without a GPU: compile them, and read their machine code.

`kernels` says what is compiled, `sass` and `amdgcn` read what NVIDIA's and AMD's compilers make of it, and
`control_flow` finds the instructions that ordinary inputs execute.
"""
