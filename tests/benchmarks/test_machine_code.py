"""The reader of machine code finds loops, rare branches and pipes in listings whose counts are known by hand."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as when the scripts run

from compiled import amdgcn, sass  # noqa: E402
from compiled.gpus import ARCHITECTURES, resident_warps  # noqa: E402


def listing(body: str) -> str:
    """A listing as nvdisasm prints it: addresses before instructions, labels at the margin, two kernels."""
    lines = ['\t.section\t.text.other,"ax",@progbits', ".text.other:", "        /*0000*/   EXIT ;"]
    lines += ['\t.section\t.text.step,"ax",@progbits', "step:", ".text.step:"]
    address = 0
    for line in body.strip().splitlines():
        if line.strip().endswith(":"):
            lines.append(line.strip())
        else:
            lines.append(f"        /*{address:04x}*/                   {line.strip()} ;")
            address += 16
    return "\n".join([*lines, '\t.section\t.debug_line,"",@progbits', "        /*0000*/   NOP ;"])


def opcodes(code, path) -> list[str]:
    return [code.instructions[position].opcode for position in path]


DIVISION = """
    S2R R0, SR_TID.X
    @P0 BRA `(.L_x_9)
.L_x_1:
    LDG.E.128 R4, desc[UR4][R2.64]
    MUFU.RCP R8, R4
    BSSY B0, `(.L_x_3)
    FCHK P0, R5, R4
    @!P0 BRA `(.L_x_2)
    MOV R9, 0x10
    CALL.REL.NOINC `($__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath)
    MOV R8, R9
.L_x_2:
    BSYNC B0
.L_x_3:
    STG.E.128 desc[UR4][R2.64], R8
    @!P1 BRA `(.L_x_1)
    FADD R0, R0, R0
    EXIT
.L_x_9:
    LDG.E.U16 R4, desc[UR4][R2.64]
    STG.E.U16 desc[UR4][R2.64], R4
    @!P1 BRA `(.L_x_9)
    EXIT
$__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath:
    ISETP.NE.AND P0, PT, R1, RZ, PT
    @P0 BRA `(.L_x_11)
    MUFU.RCP R9, R4
    FFMA R9, R9, R9, R4
    FFMA R9, R9, R9, R4
.L_x_11:
    RET.REL.NODEC R10 `(step)
.L_x_12:
    BRA `(.L_x_12)
"""


def test_a_subroutine_is_off_the_ordinary_path_and_on_the_longest():
    code = sass.parse(listing(DIVISION), "step")
    loop = code.main_loop  # not the one with narrow accesses
    assert opcodes(code, code.ordinary_path(loop)) == [
        *("LDG.E.128", "MUFU.RCP", "BSSY", "FCHK", "BRA", "BSYNC", "STG.E.128", "BRA")
    ]
    assert code.longest_path(loop) == 8 + 3 + 6  # three around the call, and the subroutine
    assert opcodes(code, code.path_around(loop)) == ["S2R", "BRA", "FADD", "EXIT"]


def test_a_rare_branch_behind_the_loop_that_returns_into_it_closes_no_loop():
    code = sass.parse(
        listing("""
.L_x_1:
    LDG.E.128 R4, desc[UR4][R2.64]
    @P0 BRA `(.L_x_7)
    FADD R4, R4, R4
.L_x_2:
    STG.E.128 desc[UR4][R2.64], R4
    @!P1 BRA `(.L_x_1)
    EXIT
.L_x_7:
    FMUL R4, R4, R4
    FMUL R4, R4, R4
    BRA `(.L_x_2)
"""),
        "step",
    )
    loop = code.main_loop
    assert len(loop.body) == 8
    assert opcodes(code, code.ordinary_path(loop)) == ["LDG.E.128", "BRA", "FADD", "STG.E.128", "BRA"]
    assert code.longest_path(loop) == 7


def test_accesses_behind_a_branch_are_on_the_path_although_it_is_longer():
    """As of a kernel whose masks are branches: the path that skips its stores is not the ordinary one."""
    code = sass.parse(
        listing("""
    LDG.E.64 R4, desc[UR4][R2.64]
    @P0 BRA `(.L_x_1)
    MOV R4, R5
    STG.E.64 desc[UR4][R2.64], R4
.L_x_1:
    EXIT
"""),
        "step",
    )
    assert code.main_loop is None
    assert opcodes(code, code.ordinary_path()) == ["LDG.E.64", "BRA", "MOV", "STG.E.64", "EXIT"]


def test_a_call_of_a_local_label_is_a_branch():
    """So ptxas leaves loops for compute capability 8.6; read as a call, the loop would have no end."""
    code = sass.parse(
        listing("""
.L_x_1:
    LDG.E.128 R4, [R2.64]
    @P1 CALL.REL.NOINC `(.L_x_2)
    BRA `(.L_x_1)
.L_x_2:
    EXIT
"""),
        "step",
    )
    assert opcodes(code, code.ordinary_path(code.main_loop)) == ["LDG.E.128", "CALL.REL.NOINC", "BRA"]
    assert opcodes(code, code.path_around(code.main_loop)) == ["EXIT"]


def test_without_the_wide_loop_there_is_no_main_loop():
    """The loop over full chunks is unrolled, and only that over the last elements is left."""
    code = sass.parse(
        listing("""
    @P0 BRA `(.L_x_1)
    LDG.E.128 R4, [R2.64]
    LDG.E.128 R8, [R2.64+0x10]
    EXIT
.L_x_1:
    LDG.E.U16 R4, [R2.64]
    @P1 BRA `(.L_x_1)
    EXIT
"""),
        "step",
    )
    assert code.main_loop is None
    assert len(code.ordinary_path()) == 4


def test_what_cannot_be_followed_raises():
    with pytest.raises(ValueError, match="computed address"):
        sass.parse(listing("BRX R2 -0x10"), "step")
    with pytest.raises(ValueError, match="not in the listing"):
        sass.parse(listing("BRA `(.L_x_5)"), "step")
    with pytest.raises(ValueError, match="no kernel 'mean'"):
        sass.parse(listing("EXIT"), "mean")
    with pytest.raises(ValueError, match=r"unknown opcode 'QFMA\.X'"):
        sass.pipe("QFMA.X")


@pytest.mark.parametrize(
    ("opcode", "pipe", "operations"),
    [
        ("FFMA.FTZ", "fp32", 1),
        ("FADD2", "fp32", 2),
        ("IMAD.MOV.U32", "multiply", 1),
        ("IADD3.X", "integer", 1),
        ("UIADD3", "other", 1),
        ("FCHK", "convert", 1),
        ("F2F.BF16.F32", "convert", 1),
        ("F2FP.BF16.F32.PACK_AB", "integer", 2),
        ("F2F.F64.F32", "fp64", 1),
        ("DFMA", "fp64", 1),
        ("LDG.E.128", "memory", 1),
    ],
)
def test_pipes(opcode, pipe, operations):
    assert sass.pipe(opcode) == (pipe, operations)


ASSEMBLY = """
step:                                   ; @step
.Lfunc_begin0:
\ts_load_dwordx2 s[2:3], s[0:1], 0x0
\ts_cbranch_vccz .LBB0_3
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
\tbuffer_load_dwordx4 v[2:5], v1, s[4:7], 0 offen
\tglobal_load_ushort v6, v[0:1], off
\tv_rcp_f32_e32 v2, v2
\tv_add_f64 v[2:3], v[2:3], v[4:5]
\ts_add_u32 s0, s0, 1
\tglobal_store_short_d16_hi v[0:1], v6, off
\ts_cbranch_scc1 .LBB0_1
.LBB0_3:
\ts_endpgm
.Lfunc_end0:
\tv_add_f32 v0, v0, v0
"""


def test_amd_assembly():
    code = amdgcn.parse(ASSEMBLY, "step")
    assert len(code.instructions) == 10
    path = code.ordinary_path(code.main_loop)
    assert [code.instructions[position].access_bits for position in path] == [128, 16, 0, 0, 0, 16, 0]
    pipes = [amdgcn.pipe(opcode)[0] for opcode in opcodes(code, path)]
    assert pipes == ["memory", "memory", "special", "fp64", "scalar", "memory", "other"]
    assert opcodes(code, code.path_around(code.main_loop)) == ["s_load_dwordx2", "s_cbranch_vccz", "s_endpgm"]


@pytest.mark.parametrize(
    ("target", "registers", "warps"),
    [
        ("sm_90", 90, 20),  # 96 of a scheduler's 512 per lane are allocated: five warps
        ("sm_90", 97, 16),  # 104 are
        ("sm_90", 64, 32),
        ("sm_90", 16, 64),
        ("sm_89", 16, 48),
        ("sm_90", 255, 8),
    ],
)
def test_warps_that_fit(target, registers, warps):
    assert resident_warps(ARCHITECTURES[target], registers, 4) == warps
