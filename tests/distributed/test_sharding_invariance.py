"""Given equal gradients, training gives the same bits however it is distributed."""

import functools

import pytest

from tests.support.processes.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
ROUNDINGS = ("stochastic", "kahan", "split", "split-int8")


@functools.cache
def digests(ranks: int, kinds: str) -> dict[str, str]:
    """Digests of weights and states after six steps on the same batches in every process, by kind and rounding."""
    lines = run_ranks("same_batches.py", ranks, kinds, ",".join(ROUNDINGS)).splitlines()
    return {line.rpartition(" ")[0]: line.split()[2] for line in lines if len(line.split()) == 3}


MORE = [(2, "ddp,fsdp2"), (3, "ddp,fsdp2"), (4, "fsdp2"), (6, "fsdp2,hsdp"), (8, "ddp,fsdp2,hsdp")]


@pytest.mark.parametrize(
    ("ranks", "kinds"),
    [(4, "hsdp,cp"), *(pytest.param(*case, marks=pytest.mark.every_case) for case in MORE)],
)
def test_weights_and_states_are_those_of_one_process(ranks, kinds):
    """Random bits belong to elements of the full tensor; Kahan's compensation is rounded stochastically as well."""
    alone = digests(1, "ddp")
    assert len(set(alone.values())) == len(ROUNDINGS)  # the digest sees what is trained
    assert digests(ranks, kinds) == {f"{k} {r}": alone[f"ddp {r}"] for k in kinds.split(",") for r in ROUNDINGS}


DDP = ["static_graph", "find_unused_parameters", "gradient_as_bucket_view", "gradient_checkpointing"]
FSDP2 = ["checkpointing", "gradient_checkpointing", "gathered", "meta", "offload", "states_on_host"]
COMPILED = [pytest.param(kind, ["compiled"], marks=pytest.mark.every_case) for kind in ("ddp", "fsdp2")]


@pytest.mark.parametrize(("kind", "variants"), [("ddp", DDP), ("fsdp2", FSDP2), *COMPILED])
def test_what_else_is_switched_on_changes_nothing(kind, variants):
    kinds = [f"{kind}-{variant}" for variant in variants]
    alone = digests(1, "ddp")["ddp kahan"]
    lines = run_ranks("same_batches.py", 2, ",".join(kinds), "kahan").splitlines()
    found = dict(line.split(" kahan ") for line in lines if " kahan " in line and line.split()[0] in kinds)
    assert found == dict.fromkeys(kinds, alone)
