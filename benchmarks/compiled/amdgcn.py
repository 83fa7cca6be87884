"""Reads the assembly that Triton's backend for AMD GPUs emits."""

from __future__ import annotations

import re

from compiled.control_flow import BRANCH, CALL, EXIT, JUMP, PLAIN, Instruction, MachineCode

VECTOR, SPECIAL, FP64, SCALAR, MEMORY, OTHER = "vector", "special", "fp64", "scalar", "memory", "other"
PIPES = (VECTOR, SPECIAL, FP64, SCALAR, MEMORY, OTHER)
"""Where an instruction is executed.

vector: 32-bit arithmetic, logic, conversions and copies (VALU).
special: reciprocal, square root and their like, at a quarter of the rate (VALU).
fp64: FP64 arithmetic (VALU).
scalar: what all threads of a wavefront share (SALU).
memory: vector and scalar loads and stores, local data share.
other: branches, waits, barriers.

Source: rocm.docs.amd.com/projects/rocprofiler-compute, "Pipeline descriptions".
"""
_WIDTHS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "short": 16, "byte": 8}
_CONTROL = (
    r"s_(branch|cbranch\w*|waitcnt\w*|nop|endpgm|barrier|setprio|sleep|sethalt|setpc_b64|swappc_b64|getpc_b64|code_end)"
)


def pipe(opcode: str) -> tuple[str, int]:
    """The pipe that executes an opcode, and how many operations per thread it is for it.

    Raises:
        ValueError: the opcode is unknown.
    """
    if re.fullmatch(_CONTROL, opcode):
        return OTHER, 1
    if opcode.startswith(
        ("global_", "buffer_", "flat_", "scratch_", "ds_", "s_load", "s_buffer_load", "s_store", "s_dcache")
    ):
        return MEMORY, 1
    if opcode.startswith("s_"):
        return SCALAR, 1
    if opcode.startswith("v_"):
        if "_f64" in opcode:
            return FP64, 1
        return (SPECIAL if re.match(r"v_(rcp|rsq|sqrt|exp|log|sin|cos)_", opcode) else VECTOR), 1
    raise ValueError(f"unknown opcode {opcode!r}: add it to benchmarks/compiled/amdgcn.py")


def parse(assembly: str, kernel: str) -> MachineCode:
    """The code of `kernel`.

    Raises:
        ValueError: the assembly has no such kernel.
    """
    labels: dict[str, int] = {}
    instructions: list[Instruction] = []
    inside = False
    for line in assembly.splitlines():
        line = line.split(";")[0].rstrip()
        if label := re.fullmatch(r"([.$\w]+):", line):
            inside = (inside or label[1] == kernel) and not label[1].startswith(".Lfunc_end")
            labels[label[1]] = len(instructions)
        elif inside and (found := re.fullmatch(r"\s+([a-z]\w*)\s*(.*)", line)):
            instructions.append(_instruction(found[1], found[2]))
    if not instructions:
        raise ValueError(f"the assembly has no kernel {kernel!r}")
    return MachineCode(instructions, labels)


def _instruction(opcode: str, operands: str) -> Instruction:
    if opcode == "s_branch":
        return Instruction(opcode, JUMP, operands)
    if opcode.startswith("s_cbranch_"):
        return Instruction(opcode, BRANCH, operands, conditional=True)
    kind = {"s_endpgm": EXIT, "s_setpc_b64": EXIT, "s_swappc_b64": CALL}.get(opcode, PLAIN)
    return Instruction(opcode, kind, access_bits=_access_bits(opcode))


def _access_bits(opcode: str) -> int:
    """How many bits a thread loads from or stores to global memory."""
    access = re.match(r"(?:global|buffer|flat)_(?:load|store)_(?:lds_)?[us]?(dwordx[234]|dword|short|byte)", opcode)
    return _WIDTHS[access[1]] if access else 0
