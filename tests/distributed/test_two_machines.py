"""Two machines, and a loss of the network: the same weights as one machine with as many ranks."""

import re
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from hf_lowprec.integrations.transformers.checkpoints.resume import choose_checkpoint
from tests.support.processes.ranks import SCRIPTS, run_ranks
from tests.support.processes.two_machines import CABLE, Machine, two_machines
from tests.support.processes.watched import Process, Processes

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, SAVE_EVERY, CUT_IN, TIMEOUT = 9, 3, 8, 6
TRAINED, SLACK = 250, 60
"""Seconds in which a run ends, and in which it ends after the network's timeout, on a busy machine."""


@pytest.fixture(scope="module")
def machines():
    with ExitStack() as stack:
        try:
            pair = stack.enter_context(two_machines())
        except OSError as error:
            pytest.skip(f"two machines need network namespaces, and root's rights on Linux: {error}")
        yield pair


def settings(out: Path) -> list[object]:
    """The arguments of the script."""
    values = {
        "output_dir": out,
        "optim": "adamw_bf16_kahan",
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": SAVE_EVERY,
        "learning_rate": 3e-3,
        "per_device_train_batch_size": 2,
        "warmup_steps": 2,
        "disable_tqdm": True,
        "use_cpu": True,
        "report_to": "none",
    }
    return [word for key, value in values.items() for word in (f"--{key}", value)]


def run_script(out: Path, *more: object) -> list[object]:
    """The arguments of `hf-lowprec` that run the unmodified script."""
    return ["run", SCRIPTS / "distributed_train_tiny.py", *settings(out), *more]


def launch(processes: Processes, machines: tuple[Machine, ...], ranks: int, *words: object) -> list[Process]:
    """Start `accelerate launch` on both machines.

    Not with `--cpu`, which starts one process per machine unless there is MPI; `use_cpu` is the script's own argument.
    """
    return [
        processes.start(
            f"machine {number} of launch {len(processes.started)}",
            machine.command(
                *(sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"),
                *("--num_machines", len(machines), "--machine_rank", number, "--num_processes", ranks),
                *("--main_process_ip", machines[0].address, "--main_process_port", 29500),
                *("--mixed_precision", "no", "--dynamo_backend", "no"),
                *words,
            ),
            GLOO_SOCKET_IFNAME=CABLE,
            TMPDIR=processes.folder,
        )
        for number, machine in enumerate(machines)
    ]


def weights(output: str, ranks: int) -> str:
    """Read the last words of all ranks, which agree: steps, dtype and a digest of all weights."""
    # Not by lines: ranks share an output, and one may print between another's text and its line break.
    lines = re.findall(r"steps=\d+ dtype=\S+ weights=[0-9a-f]{64}", output)
    assert len(lines) == ranks, output
    assert len(set(lines)) == 1, lines
    return lines[0]


def assert_same_states(ours: Path, theirs: Path) -> None:
    one, other = (
        torch.load(out / f"checkpoint-{STEPS}/optimizer.pt", weights_only=True)["state"] for out in (ours, theirs)
    )
    for key, states in one.items():
        for name, tensor in states.items():
            assert torch.equal(tensor, other[key][name]), (key, name)


@pytest.mark.every_case
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_network_is_cut_and_training_is_resumed(machines, processes, tmp_path, ranks):
    """Nine steps, the last three of them after a loss of the network, are those of as many ranks on one machine."""
    whole, out = tmp_path / "whole", tmp_path / "out"  # which both machines see
    expected = weights(run_ranks("distributed_train_tiny.py", ranks, *map(str, settings(whole))), ranks)
    assert f"steps={STEPS} dtype=torch.bfloat16" in expected

    cut = [SCRIPTS / "distributed_link_cut.py", CUT_IN, TIMEOUT, tmp_path, *run_script(out)]
    launched = launch(processes, machines, ranks, *cut)
    in_step = tmp_path / "in step"
    processes.wait("not in the step", lambda: in_step.exists() or any(p.code is not None for p in launched), TRAINED)
    with machines[0].unplugged():
        (tmp_path / "cut").touch()
        processes.wait_for_end(launched, TIMEOUT + SLACK)
    for process in launched:
        assert process.code not in (0, None), process.report()
        # Nothing crosses the cable, so each side must have noticed by itself, in the exchange of gradients.
        assert re.search(r"reduction/ddp\.py(.|\n)*(Timed out waiting|Application timeout)", process.err), (
            process.report()
        )

    saved = {path.name: stamp(path) for path in out.glob("checkpoint-*")}
    assert sorted(saved) == ["checkpoint-3", "checkpoint-6"]
    (out / "checkpoint-8").mkdir()  # as if the cut had come while one was written
    (out / "checkpoint-8/model.safetensors").write_bytes((out / "checkpoint-6/model.safetensors").read_bytes()[:1000])
    assert choose_checkpoint(True, str(out)) == str(out / "checkpoint-6")

    launched = launch(processes, machines, ranks, "-m", "hf_lowprec", *run_script(out, "--resume", True))
    processes.wait_for_end(launched, TRAINED)
    reports = "\n".join(process.report() for process in launched)
    assert all(process.code == 0 for process in launched), reports
    assert weights("".join(process.out for process in launched), ranks) == expected, reports
    assert f"DDP: FP32 sums over {ranks} ranks" in launched[0].out
    assert {name: stamp(out / name) for name in saved} == saved, "it began again"
    assert "skipped: checkpoint-8 (trainer_state.json is missing)" in launched[0].err
    assert_same_states(out, whole)


def stamp(checkpoint: Path) -> int:
    """The time when the checkpoint was written."""
    return (checkpoint / "trainer_state.json").stat().st_mtime_ns
