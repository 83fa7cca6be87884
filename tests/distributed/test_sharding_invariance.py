"""Given equal gradients, training gives the same bits however it is distributed."""

import functools

import pytest

from tests.support.processes.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
ROUNDINGS = "stochastic,kahan,split,split-int8"


@functools.cache
def digests(ranks: int, kinds: str, roundings: str) -> dict[str, str]:
    """Digests of weights and states after some steps on the same batches in every process, by kind and rounding."""
    lines = run_ranks("same_batches.py", ranks, kinds, roundings).splitlines()
    return {line.rpartition(" ")[0]: line.split()[2] for line in lines if len(line.split()) == 3}


MORE = [(2, "ddp,fsdp2"), (3, "ddp,fsdp2"), (4, "fsdp2,hsdp,cp"), (6, "fsdp2,hsdp"), (8, "ddp,fsdp2,hsdp")]


@pytest.mark.parametrize(
    ("ranks", "kinds", "roundings"),
    [
        (4, "hsdp", "stochastic,split-int8"),
        (4, "cp", "kahan"),
        *(pytest.param(*case, ROUNDINGS, marks=pytest.mark.every_case) for case in MORE),
    ],
)
def test_weights_and_states_are_those_of_one_process(ranks, kinds, roundings):
    """Random bits belong to elements of the full tensor; Kahan's compensation is rounded stochastically as well."""
    alone, modes = digests(1, "ddp", roundings), roundings.split(",")
    assert len(set(alone.values())) == len(modes)  # the digest sees what is trained
    expected = {f"{kind} {mode}": alone[f"ddp {mode}"] for kind in kinds.split(",") for mode in modes}
    assert digests(ranks, kinds, roundings) == expected


DDP = ["static_graph", "find_unused_parameters", "gradient_as_bucket_view", "gradient_checkpointing", "compiled"]
FSDP2 = ["checkpointing", "gathered", "meta", "offload", "states_on_host"]
MORE_VARIANTS = [("ddp", DDP), ("fsdp2", ["gradient_checkpointing", "compiled"])]


@pytest.mark.parametrize(
    ("kind", "variants"),
    [("fsdp2", FSDP2), *(pytest.param(*case, marks=pytest.mark.every_case) for case in MORE_VARIANTS)],
)
def test_what_else_is_switched_on_changes_nothing(kind, variants):
    kinds = [f"{kind}-{variant}" for variant in variants]
    alone = digests(1, "ddp", "kahan")["ddp kahan"]
    lines = run_ranks("same_batches.py", 2, ",".join(kinds), "kahan").splitlines()
    found = dict(line.split(" kahan ") for line in lines if " kahan " in line and line.split()[0] in kinds)
    assert found == dict.fromkeys(kinds, alone)
