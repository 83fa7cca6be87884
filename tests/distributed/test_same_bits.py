"""Given equal gradients, training gives the same bits however it is distributed, resumed, released or offloaded."""

import functools
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import TorchDynamoPlugin
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

import hf_lowprec
from hf_lowprec.optim import host_steps
from hf_lowprec.optim.gradients import buckets as gradient_buckets
from hf_lowprec.reduction import check_replicas
from hf_lowprec.rounding.attached_low_bits import attached_low_bits
from tests.scripts.trainer_ranks import llama, text
from tests.support.chosen_cases import one_in_turn
from tests.support.optim.simulated_copies import simulate_device
from tests.support.processes.fsdp_on_cpu import accelerator_arguments, allow_fsdp_on_cpu
from tests.support.processes.ranks import on_ranks
from tests.support.processes.shards import digest, gathered

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

HALF = 2
"""Half of the steps."""
DDP = {name: {name: True} for name in ("static_graph", "find_unused_parameters", "gradient_as_bucket_view")}
DDP["small_buckets"] = {"bucket_cap_mb": 0.01}


def prepare(kind: str, rounding: str, format: str = "full", build=llama, **options):
    """An accelerator, and a model with its optimizer, which `format` says how to save.

    Args:
        kind: ddp, fsdp2, hsdp or cp, followed by "-" and what else is switched on.
        rounding: followed by "-int8" for states in 8 bits.
    """
    kind, _, variant = kind.partition("-")
    sharding = accelerator_arguments(
        kind,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type=f"{format.upper()}_STATE_DICT",
        activation_checkpointing=variant == "checkpointing",
        reshard_after_forward=variant != "gathered",
        cpu_ram_efficient_loading=variant == "meta",
        cpu_offload=CPUOffloadPolicy(pin_memory=False) if variant == "offload" else OffloadPolicy(),
    )
    accelerator = Accelerator(
        cpu=True,
        **sharding,
        kwargs_handlers=[DistributedDataParallelKwargs(**DDP[variant])] if variant in DDP else [],
        dynamo_plugin=TorchDynamoPlugin(backend="aot_eager") if variant == "compiled" else None,
    )
    rounding, _, in_8_bits = rounding.partition("-")
    model = build(hidden_size=64) if in_8_bits else build()
    exact = [param.detach().clone() for param in model.parameters()]
    if not accelerator.is_main_process and (kind == "ddp" or variant == "meta"):  # rank 0's weights replace these
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.25 if kind == "ddp" else 0)
    if variant == "states_on_host":
        simulate_device(pytest.MonkeyPatch(), seed=accelerator.process_index)
        options["offload_states"] = True
    if variant == "gradient_checkpointing":
        model.gradient_checkpointing_enable()
    hf_lowprec.cast_model(model)
    one_of_each = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32}
    state_dtype = torch.int8 if in_8_bits else one_of_each
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-2, rounding=rounding, state_dtype=state_dtype, **options)
    hf_lowprec.prepare_accelerator(accelerator)
    model, wrapped = accelerator.prepare(model, optimizer)
    for param, estimate, weight in zip(model.parameters(), fp32_weights(model, optimizer), exact, strict=True):
        if build is llama:  # parameters of adapters may begin at zero, without low bits
            assert (attached_low_bits(param) is not None) == (param.dtype == torch.bfloat16)
            assert ((estimate - weight).abs() <= 2.0**-16 * weight.abs()).all()
    return accelerator, model, wrapped


def fp32_weights(model, optimizer) -> list[torch.Tensor]:
    return [gathered(estimate) for estimate in hf_lowprec.fp32_state_dict(model, optimizer).values()]


def train(accelerator, model, optimizer, steps: range, clip: float = 1.0, micro_batches: int = 1, synced: bool = False):
    """Train on the same batches in every process; `synced` reduces the gradients of every micro-batch."""
    accelerator.gradient_accumulation_steps = micro_batches
    rows = text(64)
    for step in steps:
        for micro_batch in range(micro_batches):
            tokens = torch.stack([row["input_ids"] for row in rows[2 * step + micro_batch : 2 * step + 2]])
            with nullcontext() if synced else accelerator.accumulate(model):
                accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def check_next_optimizer(model, optimizer) -> None:
    """An optimizer that is built after the training begins with the FP32 weights at its end, in the same shards."""
    expected = fp32_weights(model, optimizer)
    hf_lowprec.keep_low_bits(optimizer)
    following = hf_lowprec.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, rounding="split", seed=5)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    following.step()
    assert all(map(torch.equal, fp32_weights(model, following), expected))


def digests(kinds: str, roundings: str, task: str = "", format: str = "full", folder: str = "") -> dict[str, str]:
    """Digests of weights and states after four steps, by kind and rounding; a "save" is half-way, as is a "resume"."""
    allow_fsdp_on_cpu()
    found = {}
    for kind, rounding in product(kinds.split(","), roundings.split(",")):
        accelerator, model, wrapped = run = prepare(kind, rounding, format)
        if task == "resume":
            accelerator.load_state(str(Path(folder, rounding)))
        else:
            train(*run, range(HALF))
        if task == "save":
            accelerator.save_state(str(Path(folder, rounding)))
        train(*run, range(HALF, 2 * HALF))
        optimizer = wrapped.optimizer
        found[f"{kind} {rounding}"] = digest(model.parameters(), optimizer)
        assert any("exp_avg_code" in state for state in optimizer.state.values()) == rounding.endswith("-int8")
        check_replicas(model, wrapped)
        if rounding.startswith("split"):
            check_next_optimizer(model, optimizer)
    return found


@functools.cache
def of_one_process(rounding: str) -> str:
    (alone,) = on_ranks(digests, 1, "ddp", rounding).values()
    return alone


def check_digests(ranks: int, kinds: str, roundings: str, *task: object) -> None:
    alone = {rounding: of_one_process(rounding) for rounding in roundings.split(",")}
    assert len(set(alone.values())) == len(alone)  # the digest sees what is trained
    expected = {f"{kind} {rounding}": alone[rounding] for kind in kinds.split(",") for rounding in alone}
    assert on_ranks(digests, ranks, kinds, roundings, *task) == expected


ROUNDINGS = "stochastic,kahan,split,split-int8"
FSDP2 = "fsdp2-checkpointing,fsdp2-gathered,fsdp2-offload,fsdp2-states_on_host"
MORE_DDP = "static_graph", "find_unused_parameters", "gradient_as_bucket_view", "gradient_checkpointing", "compiled"
MORE = [
    *((2, "ddp,fsdp2"), (3, "ddp,fsdp2"), (4, "fsdp2,hsdp,cp"), (6, "fsdp2,hsdp"), (8, "ddp,fsdp2,hsdp")),
    (2, ",".join(f"ddp-{variant}" for variant in MORE_DDP)),
    (2, "fsdp2-gradient_checkpointing,fsdp2-compiled"),
]


@pytest.mark.parametrize(
    ("ranks", "kinds", "roundings"),
    [
        (3, "ddp,fsdp2,fsdp2-meta", "split"),  # of 36 rows: uneven
        (2, FSDP2, "kahan"),
        (4, "hsdp", "stochastic,split-int8"),
        (4, "cp", "kahan"),
        *(
            pytest.param(*case, ROUNDINGS if "-" not in case[1] else "kahan", marks=pytest.mark.every_case)
            for case in MORE
        ),
    ],
)
def test_weights_and_states_are_those_of_one_process(ranks, kinds, roundings):
    """Random bits belong to elements of the full tensor; Kahan's compensation is rounded stochastically as well.

    Low bits of the FP32 weights, which are those of rank 0, are in the right shards before the first step, and for an
    optimizer that follows.
    """
    check_digests(ranks, kinds, roundings)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("ranks", "kind", "format", "roundings", "then"),
    [
        (4, "fsdp2", "sharded", "kahan,split", {3: "fsdp2", 2: "fsdp2-states_on_host"}),
        (4, "fsdp2", "full", "kahan,split", {2: "fsdp2"}),
        (2, "ddp", "full", "stochastic", {2: "ddp"}),
    ],
)
def test_some_ranks_save_and_others_go_on(tmp_path, ranks, kind, format, roundings, then):
    """By `save_state` and `load_state`; `test_resharding.py` has torch's own formats."""
    check_digests(ranks, kind, roundings, "save", format, tmp_path)
    for others, other in then.items():
        check_digests(others, other, roundings, "resume", format, tmp_path)


def released(kind: str, rounding: str, limit: float = 0, micro_batches: int = 1, synced: bool = False, **options):
    """The digest, the largest share of the gradients that existed at once after the first step, and norms."""
    run = prepare(kind, rounding, **options, **({"max_grad_norm": limit} if limit else {}))
    optimizer, norms, shares = run[2].optimizer, [], [0.0]
    params = [param for group in optimizer.param_groups for param in group["params"]]

    def count(plan) -> None:
        alive = sum(param.grad.numel() for param in params if param.grad is not None)
        shares.append(alive / sum(map(torch.Tensor.numel, params)))

    for step in range(3):
        if step == 1 and optimizer.gradient_release:  # DDP chooses its buckets in the first step
            optimizer.before_part.append(count)
        train(*run, range(step, step + 1), limit, micro_batches, synced)
        norms += [float(optimizer.grad_norm)] if limit else []
    check_replicas(run[1], run[2])
    return digest(run[1].parameters(), optimizer), max(shares), norms


def check_released(kinds: str, roundings: str) -> None:
    """States may be on the host, too, and gradients, which are accumulated and clipped there."""
    gradient_buckets.BUCKET_ELEMENTS = host_steps.BUCKET_ELEMENTS = 4000  # of 44,000, or 93,000 with states in 8 bits
    allow_fsdp_on_cpu()
    seen: dict[str, tuple] = {}
    for number, (kind, rounding) in enumerate(product(kinds.split(","), roundings.split(","))):
        ordinary, _, _ = released(kind, rounding)
        found, share, _ = released(kind, rounding, gradient_release=True)
        assert found == ordinary, kind
        assert share < (0.8 if "ddp" in kind else 0.5), kind  # under DDP, three of its buckets are in flight
        synchronized = one_in_turn((False, True), number)
        accumulated = [released(kind, rounding, 0.25, 2, synced) for synced in synchronized]
        with pytest.MonkeyPatch.context() as patch:
            simulate_device(patch, seed=dist.get_rank())
            for options in one_in_turn(({"gradient_release": True}, {}), number):
                assert released(kind, rounding, offload_states=True, **options)[0] == ordinary, options
            for synced, expected in zip(synchronized, accumulated, strict=True):
                on_host = {"offload_states": True, "offload_gradients": True}
                assert released(kind, rounding, 0.25, 2, synced, **on_host) == expected, synced
        _, _, norms = released(kind, rounding, 0.25, gradient_release=True, clip="delayed")
        assert len(norms) == 3 and min(norms) > 0.25, kind
        assert seen.setdefault(rounding, (ordinary, norms)) == (ordinary, norms), kind


@pytest.mark.parametrize(
    ("ranks", "kinds", "roundings"),
    [
        pytest.param(2, "ddp-small_buckets,fsdp2", "kahan", marks=pytest.mark.every_case),
        pytest.param(3, "ddp-small_buckets,fsdp2", "split-int8", marks=pytest.mark.every_case),
        pytest.param(4, "hsdp", "kahan", marks=pytest.mark.every_case),
        (4, "hsdp", "split-int8"),
    ],
)
def test_released_steps_are_the_ordinary_ones(ranks, kinds, roundings):
    """All kinds see the same batches on all ranks, so they have the bits of one process, and the same norms."""
    on_ranks(check_released, ranks, kinds, roundings)
