"""How many warps multiprocessors hold: figures of their makers, with the source of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """A generation of multiprocessors (NVIDIA) or compute units (AMD).

    Attributes:
        schedulers: per multiprocessor; each issues an instruction of one warp per clock.
        warps: of how many a scheduler holds the state, at most.
        programs: of how many programs a multiprocessor holds the state, at most.
        registers: per scheduler and lane of a warp.
        register_granularity: in which registers of a thread are allocated.
    """

    schedulers: int
    warps: int
    programs: int
    registers: int
    register_granularity: int


def _nvidia(warps: int, programs: int) -> Architecture:
    # "Technical Specifications per Compute Capability", CUDA Programming Guide.
    return Architecture(4, warps // 4, programs, 512, 8)


ARCHITECTURES = {
    "sm_80": _nvidia(warps=64, programs=32),
    "sm_86": _nvidia(warps=48, programs=16),
    "sm_89": _nvidia(warps=48, programs=24),
    "sm_90": _nvidia(warps=64, programs=32),
    "sm_100": _nvidia(warps=64, programs=32),
    "sm_120": _nvidia(warps=48, programs=24),
    # 512 vector registers per lane and 8 wavefronts per SIMD unit: LLVM's "User Guide for AMDGPU Backend".
    "gfx942": Architecture(4, 8, 32, 512, 8),
}
"""By Triton's name."""


def resident_warps(architecture: Architecture, registers: int, warps_per_program: int) -> int:
    """How many warps of a kernel a multiprocessor has room for, by registers and by its limits."""
    granularity = architecture.register_granularity
    allocated = max(-(-registers // granularity) * granularity, granularity)
    per_scheduler = min(architecture.warps, architecture.registers // allocated)
    programs = min(architecture.programs, per_scheduler * architecture.schedulers // warps_per_program)
    return programs * warps_per_program
