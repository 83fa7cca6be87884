"""Gradients of DDP and FSDP2 on real ranks: means in rank order, in as many bytes as a native reduction of BF16."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from hf_lowprec.reduction.collectives import ScratchBuffers
from tests.support.chosen_cases import EVERY_CASE
from tests.support.processes.ranks import SCRIPTS, run_script


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("script", "worlds", "said"),
    [
        ("reduction_ddp.py", (1, 2, 3, 8) if EVERY_CASE else (3,), "11 cases agree on {} ranks"),
        # HSDP's is the mean over replicas of FP32 sums.
        ("reduction_fsdp2.py", (2, 3, 4) if EVERY_CASE else (3, 4), "FSDP2 agrees on {} ranks"),
    ],
)
def test_gradients_are_means_in_rank_order(script: str, worlds: tuple[int, ...], said: str) -> None:
    printed = run_script(script, *worlds)
    assert all(said.format(ranks) in printed for ranks in worlds)


@pytest.mark.slow
@pytest.mark.distributed
def test_what_would_round_twice_is_refused() -> None:
    printed = run_script("reduction_refusals.py")
    assert printed.count("check_") == 8


def test_scratch_memory_is_kept_by_name_and_dtype_and_grows_to_the_largest_size() -> None:
    scratch, like = ScratchBuffers(), torch.empty(0, dtype=torch.bfloat16)
    first = scratch.get("received", 10, like)
    assert (first.shape, first.dtype, scratch.nbytes) == ((10,), torch.bfloat16, 20)
    assert scratch.get("received", 4, like).data_ptr() == first.data_ptr()
    assert scratch.get("padded", 3, like).data_ptr() != first.data_ptr()
    assert scratch.get("received", 3, like.float()).dtype == torch.float32
    assert scratch.get("received", 11, like).shape == (11,)
    assert scratch.nbytes == 22 + 6 + 12


def namespace() -> tuple[str, ...]:
    """A command that runs another one with a loopback interface of its own; skips where that is not possible."""
    lift = 'ip link set lo up && exec "$@"'
    for command in (["unshare", "--net"], ["unshare", "--net", "--map-root-user"]):
        within = (*command, "sh", "-c", lift, "sh")
        if (
            shutil.which(command[0])
            and subprocess.run([*within, "true"], capture_output=True, check=False).returncode == 0
        ):
            return within
    pytest.skip("no network namespace can be made here (needs Linux, unshare, ip, and the right to do so)")


@pytest.mark.every_case
@pytest.mark.slow
@pytest.mark.distributed
def test_gradients_travel_in_as_many_bytes_as_a_native_reduction_of_bf16():
    """Each rank sends 2 (N − 1) / N times the bucket, half as much as in FP32."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS.parents[1]), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*namespace(), sys.executable, str(SCRIPTS / "reduction_bytes.py")],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "as many bytes as defined" in done.stdout
