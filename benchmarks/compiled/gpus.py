"""What GPUs can do: figures of their makers, with the source of each."""

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
        rates: operations of single threads per clock and multiprocessor, by what limits them; see `speed_limits`.
    """

    schedulers: int
    warps: int
    programs: int
    registers: int
    register_granularity: int
    rates: dict[str, float]


def _nvidia(warps: int, programs: int, fp32: int, fp64: int) -> Architecture:
    # Instructions per clock: "Throughput of Native Arithmetic Instructions" in NVIDIA's CUDA C++ Best Practices Guide
    # (version 13, section 12.1.1), as "results per clock cycle per multiprocessor". Conversions and special functions:
    # 16 for all generations. IADD3 alone reaches 128 on 12.0; the rest of the integer pipe is at 64 everywhere.
    # Warps, programs and registers: "Technical Specifications per Compute Capability", CUDA Programming Guide.
    rates = {"issue": 128, "fp32 units": fp32, "multiply": 64, "integer": 64, "convert": 16, "fp64": fp64}
    return Architecture(4, warps // 4, programs, 512, 8, rates)


ARCHITECTURES = {
    "sm_80": _nvidia(warps=64, programs=32, fp32=64, fp64=32),
    "sm_86": _nvidia(warps=48, programs=16, fp32=128, fp64=2),
    "sm_89": _nvidia(warps=48, programs=24, fp32=128, fp64=2),
    "sm_90": _nvidia(warps=64, programs=32, fp32=128, fp64=64),
    "sm_100": _nvidia(warps=64, programs=32, fp32=128, fp64=64),
    "sm_120": _nvidia(warps=48, programs=24, fp32=128, fp64=2),
    # 512 vector registers per lane and 8 wavefronts per SIMD unit: LLVM's "User Guide for AMDGPU Backend". No rates:
    # nothing is predicted for AMD.
    "gfx942": Architecture(4, 8, 32, 512, 8, {}),
}
"""By Triton's name."""


def resident_warps(architecture: Architecture, registers: int, warps_per_program: int) -> int:
    """How many warps of a kernel a multiprocessor has room for, by registers and by its limits."""
    granularity = architecture.register_granularity
    allocated = max(-(-registers // granularity) * granularity, granularity)
    per_scheduler = min(architecture.warps, architecture.registers // allocated)
    programs = min(architecture.programs, per_scheduler * architecture.schedulers // warps_per_program)
    return programs * warps_per_program


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        architecture: key of `ARCHITECTURES`.
        multiprocessors: that are enabled.
        clock: boost clock in Hz, which a limit on power may prevent.
        bandwidth: of the memory, bytes per second, as advertised.
        sources: where the figures are from.
    """

    architecture: str
    multiprocessors: int
    clock: float
    bandwidth: float
    sources: str


GPUS = {
    "A100": Gpu("sm_80", 108, 1.410e9, 2.039e12, "NVIDIA A100 datasheet (SXM, 80 GB) and architecture whitepaper"),
    "H100": Gpu("sm_90", 132, 1.980e9, 3.35e12, "NVIDIA H100 datasheet (SXM) and architecture whitepaper, Table 3"),
    "H200": Gpu("sm_90", 132, 1.980e9, 4.8e12, "NVIDIA H200 datasheet (SXM); multiprocessors and clock as of H100"),
    "B200": Gpu(
        "sm_100",
        148,
        1.965e9,
        8.0e12,
        "NVIDIA DGX B200 datasheet (bandwidth; a driver reports 7.67e12: github.com/pytorch/ao/pull/4002), "
        "TechPowerUp (multiprocessors, clock)",
    ),
    "RTX 4090": Gpu("sm_89", 128, 2.520e9, 1.008e12, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
}
