"""Reads NVIDIA's machine code (SASS), as `nvdisasm -c` prints it."""

from __future__ import annotations

import re

from compiled.control_flow import BRANCH, CALL, EXIT, JUMP, PLAIN, Instruction, MachineCode

FP32, MULTIPLY, INTEGER, CONVERT = "fp32", "multiply", "integer", "convert"
FP64, MEMORY, OTHER = "fp64", "memory", "other"
PIPES = (FP32, MULTIPLY, INTEGER, CONVERT, FP64, MEMORY, OTHER)
"""Where an instruction is executed.

fp32: FP32 addition and multiplication; FP16 arithmetic, which is used to copy constants.
multiply: integer multiply-add (IMAD), half of the FP32 units; compilers also use it to add, shift and copy.
integer: addition, logic, shifts, comparisons, selections, copies (ALU); conversions of fixed latency (I2FP, F2FP).
convert: special functions (reciprocal and its root), conversions, and the range check of a division (XU).
fp64: FP64 arithmetic, comparisons, and conversions from and to FP64.
memory: loads, stores, atomics, shuffles.
other: branches and barriers, constants, special registers, and the scalar unit that all threads of a warp share.

Sources. FP32 and IMAD: Greg Smith of NVIDIA, forums.developer.nvidia.com/t/302018/7 and /t/108729/4. Special functions
and conversions: "XU" among the pipelines of Nsight Compute's profiling guide. FCHK: its opcode lies among those of
MUFU, F2F and I2F (0x300 to 0x309), and like theirs its result is awaited through a scoreboard, which the control bits
in the listing show. Those of I2FP and F2FP show none, so these are executed elsewhere; that it is the integer pipe, and
that F2FP takes it for two operations, is an assumption.
"""

_OPCODES = {
    FP32: "FFMA FMUL FADD FHADD FSWZADD FMUL32I FADD32I FFMA32I HFMA2 HADD2 HMUL2",
    MULTIPLY: "IMAD IDP IMUL",
    INTEGER: (
        "IADD3 IADD VIADD LOP3 LOP PLOP3 SHF SHL SHR PRMT ISETP FSETP FSET SEL FSEL FMNMX FMNMX3 IMNMX VIMNMX VIMNMX3 "
        "VIADDMNMX LEA MOV IABS BMSK SGXT P2R R2P VABSDIFF HSETP2 HMNMX2 VOTE I2FP F2IP I2IP ISCADD "
        "ICMP FCMP MOV32I LOP32I IADD32I"
    ),
    CONVERT: "MUFU F2F I2F F2I FRND FCHK POPC FLO BREV",
    FP64: "DADD DMUL DFMA DSETP DMNMX",
    MEMORY: "LDG STG LD ST LDS STS LDL STL LDSM STSM LDGSTS ATOM ATOMG ATOMS RED REDG SHFL MATCH REDUX",
    OTHER: (
        "BRA BRX JMP BSSY BSYNC BREAK BMOV CALL RET EXIT WARPSYNC NOP BAR DEPBAR LDGDEPBAR YIELD ERRBAR MEMBAR "
        "NANOSLEEP VOTEU S2R CS2R S2UR R2UR LDC LDCU ULDC KILL BPT CCTL RPCMOV PREEXIT ACQBULK ELECT"
    ),
}
_PIPE = {opcode: pipe for pipe, opcodes in _OPCODES.items() for opcode in opcodes.split()}
_TWO_OPERATIONS = {"FFMA2": FP32, "FMUL2": FP32, "FADD2": FP32, "F2FP": INTEGER}
"""Two FP32 operations in one instruction (compute capability 10.0), and the conversion of two numbers."""


def pipe(opcode: str) -> tuple[str, int]:
    """The pipe that executes an opcode, and how many operations per thread it is for it.

    Raises:
        ValueError: the opcode is unknown; add it to this file.
    """
    name, *modifiers = opcode.split(".")
    if name in _TWO_OPERATIONS:
        return _TWO_OPERATIONS[name], 2
    if "F64" in modifiers:
        return FP64, 1
    if name in _PIPE:
        return _PIPE[name], 1
    if name.startswith("U"):  # the scalar unit's instructions are named after those of the vector units
        return OTHER, 1
    raise ValueError(f"unknown opcode {opcode!r}: add it to _OPCODES in benchmarks/compiled/sass.py")


def parse(listing: str, kernel: str) -> MachineCode:
    """The code of `kernel` in the output of `nvdisasm -c`.

    Raises:
        ValueError: the listing has no such kernel, or a branch to an address that is computed.
    """
    labels: dict[str, int] = {}
    instructions: list[Instruction] = []
    inside = False
    for line in listing.splitlines():
        if section := re.match(r"\s*\.section\s+([^\s,]+)", line):
            inside = section[1] == f".text.{kernel}"
        elif not inside:
            continue
        elif label := re.match(r"\s*([.$\w]+):\s*$", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            instructions.append(_instruction(found[1]))
    if not instructions:
        raise ValueError(f"the listing has no kernel {kernel!r}")
    return MachineCode(instructions, labels)


def _instruction(text: str) -> Instruction:
    predicate, opcode, operands = re.fullmatch(r"(@!?U?P\w+\s+)?([\w.]+)\s*(.*)", text).groups()  # type: ignore[union-attr]
    name = opcode.split(".")[0]
    label = re.search(r"`\(([.$\w]+)\)", operands)
    target = label[1] if label else None
    conditional = predicate is not None
    if name in ("BRX", "JMX", "JMP"):
        raise ValueError(f"{text!r} branches to a computed address, which this reader does not follow")
    # For some architectures ptxas leaves a loop by a call of the label behind it, from which nothing returns.
    if name == "BRA" or (name == "CALL" and target is not None and target.startswith(".L")):
        conditional = conditional or re.match(r"!?U?P[\dT]", operands) is not None
        return Instruction(opcode, BRANCH if conditional else JUMP, target, conditional)
    kinds = {"CALL": CALL, "EXIT": EXIT, "RET": EXIT, "KILL": EXIT}
    kind = kinds.get(name, PLAIN)
    return Instruction(opcode, kind, target if kind == CALL else None, conditional, _access_bits(opcode))


def _access_bits(opcode: str) -> int:
    """How many bits a thread loads from or stores to global memory."""
    name, *modifiers = opcode.split(".")
    if name not in ("LDG", "STG", "LD", "ST"):
        return 0
    widths = [int(width[1]) for modifier in modifiers if (width := re.fullmatch(r"[US]?(8|16|64|128|256)", modifier))]
    return widths[-1] if widths else 32
