"""DeepSpeed ZeRO 1, 2 and 3: weights and states are those of one process with the same gradients, bit for bit."""

import functools
import gc
import itertools
import random
import zlib
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_lowprec
from hf_lowprec import optim
from hf_lowprec.integrations.deepspeed.initialize import initialize_deepspeed
from hf_lowprec.optim.sharding import flat_part
from tests.support.chosen_cases import EVERY_CASE, covering
from tests.support.models import tiny_models
from tests.support.optim.simulated_copies import simulate_device
from tests.support.processes.ranks import on_ranks
from tests.support.processes.shards import of_every_rank

STEPS = 2
RANKS = (2, 3, 4, 8)
MODELS = {
    "llama": tiny_models.llama,
    "uneven": lambda: tiny_models.llama(hidden_size=40, intermediate_size=70),
    "mixture": tiny_models.qwen3_moe,
    "encoder": tiny_models.bert,
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "ranks": RANKS,
    "stage": (1, 2, 3),
    "algorithm": ("AdamW", "SGD", "Lion", "Adan", "Muon"),
    "rounding": ("split", "kahan", "stochastic"),
    "state_dtype": (None, torch.float32, torch.int8),
    "model": tuple(MODELS),
    "accumulated": (None, "bf16", "fp32"),
    "several_groups": (False, True),
    "frozen": (False, True),
    "clip": (0.0, 0.3),
    "bucket": (500_000_000, 3000, 20),
    "options": ("", "overlap_comm", "round_robin_gradients"),
    "layout": ("", "scattered", "nothing persists", "sub-groups"),
    "offload_states": (False, True),
}
CANCELLED = {1: (1, 2**14), 2: (1, -(2**14))}
"""On three ranks and more: the batch and the factor of gradients of some."""
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "overlap_comm": {"overlap_comm": True},
    "scattered": {"contiguous_gradients": False},
    "round_robin_gradients": {"round_robin_gradients": True},
    "nothing persists": {"stage3_param_persistence_threshold": 0},
    "sub-groups": {"stage3_param_persistence_threshold": 0, "sub_group_size": 3000},
}


def cases() -> list[dict[str, Any]]:
    """On two or three ranks every pair of values occurs; with HF_LOWPREC_EVERY_CASE, on all numbers every triple."""
    generator = random.Random(0)
    drawn = [{name: generator.choice(values) for name, values in FACTORS.items()} for _ in range(4000)]
    # DeepSpeed's ZeRO 1 has FP32 weights when it accumulates in FP32. Muon does not offload states.
    drawn = [
        case
        for case in drawn
        if (case["stage"], case["accumulated"]) != (1, "fp32")
        and (case["algorithm"], case["offload_states"]) != ("Muon", True)
    ]
    if EVERY_CASE:
        return [drawn[k] for k in covering(drawn, 3)]
    few = [case for case in drawn if case["ranks"] < 4]
    return [few[k] for k in covering(few, 2)]


def groups_of(model: nn.Module, several: bool) -> list[dict[str, Any]]:
    """The trainable parameters in two groups, of which the second is not in the model's order, or in one."""
    params = [param for param in model.parameters() if param.requires_grad]
    if not several:
        return [{"params": params}]
    vectors = [param for param in params if param.dim() == 1]
    return [
        {"params": vectors[::-1], "weight_decay": 0.0},
        {"params": []},
        {"params": [param for param in params if param.dim() > 1], "lr": 3e-3},
    ]


def build(case: dict[str, Any], state_dtype: torch.dtype | None, **options: Any) -> tuple[nn.Module, Any, Any]:
    """The model, a batch and an optimizer."""
    model, batch = MODELS[case["model"]]()
    if case["frozen"]:
        for number, param in enumerate(model.parameters()):
            param.requires_grad_(number % 5 != 1)
    hf_lowprec.cast_model(model)
    more: dict[str, Any] = {"momentum": 0.9} if case["algorithm"] == "SGD" else {}
    if case["algorithm"] == "Muon":
        more = {"matrices": hf_lowprec.hidden_matrices(model)}
    optimizer = getattr(optim, case["algorithm"])(
        groups_of(model, case["several_groups"]),
        lr=1e-2,
        weight_decay=0.1,
        rounding=case["rounding"],
        state_dtype=state_dtype,
        **options,
        **more,
    )
    return model, batch, optimizer


def configuration(case: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's."""
    zero = {"stage": case["stage"], "reduce_bucket_size": case["bucket"], **OPTIONS[case["options"]]}
    if case["stage"] == 3:
        zero |= OPTIONS[case["layout"]]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2 if case["accumulated"] else 1,
        "gradient_clipping": case["clip"],
        "zero_optimization": zero,
    }
    if case["accumulated"] == "fp32":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def batch_of(batch: dict[str, Tensor], *place: int) -> dict[str, Tensor]:
    """Other tokens for every rank, step and micro-batch."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(place).encode()))
    tokens = torch.randint(3, 96, batch["input_ids"].shape, generator=generator)
    labels = tokens if batch["labels"].dim() > 1 else batch["labels"]
    return {**batch, "input_ids": tokens, "labels": labels}


def mean(per_rank: list[Tensor]) -> Tensor:
    total = torch.zeros_like(per_rank[0], dtype=torch.float32)
    for gradient in per_rank:  # sent in BF16, whatever it is
        total = total + gradient.bfloat16().float()
    return (total / len(per_rank)).bfloat16()


def reduced(micro_batches: list[list[Tensor]], dtype: torch.dtype, case: dict[str, Any]) -> Tensor:
    """The gradient of a step; ZeRO 1 accumulates before it reduces, the others after.

    Args:
        micro_batches: for each micro-batch, the gradient of each rank.
        dtype: that of the parameter.
        case: tells the stage, and the dtype in which means are accumulated.
    """
    if case["stage"] == 1:
        return mean([sum(parts[1:], parts[0]) for parts in zip(*micro_batches, strict=True)]).to(dtype)
    means = [mean(per_rank) for per_rank in micro_batches]
    if case["accumulated"] == "fp32":
        means = [part.float() for part in means]
    return sum(means[1:], means[0]).to(dtype)


def gathered(tensors: list[Tensor]) -> list[list[Tensor]]:
    """For each of the 1-D tensors, that of every rank."""
    flat = torch.cat([tensor.float() for tensor in tensors])
    received = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(received, flat)
    split = [whole.split([tensor.numel() for tensor in tensors]) for whole in received]
    return [[part.to(own.dtype) for part in parts] for own, *parts in zip(tensors, *split, strict=True)]


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def check(case: dict[str, Any]) -> None:
    if case["offload_states"]:
        simulate_device(pytest.MonkeyPatch(), seed=dist.get_rank())
    model, batch, optimizer = build(case, case["state_dtype"], offload_states=case["offload_states"])
    params = params_of(optimizer)
    own: dict[int, Tensor] = {}
    # Those of ranks 1 and 2 cancel, after what they have rounded off: the order of the sum decides about its bits.
    rank, factor = (dist.get_rank(), 1) if case["ranks"] == 2 else CANCELLED.get(dist.get_rank(), (dist.get_rank(), 1))

    def take(k: int, gradient: Tensor) -> Tensor:
        own[k] = (gradient * factor).view(-1)
        return gradient * factor

    for k, param in enumerate(params):
        param.register_hook(functools.partial(take, k))
    # States are not in 8 bits where a rank's part of a parameter cuts their blocks.
    dtypes = {case["state_dtype"], None} if case["state_dtype"] == torch.int8 else {case["state_dtype"]}
    references = {dtype: build(case, dtype, max_grad_norm=case["clip"] or None)[2] for dtype in dtypes}
    engine, *_ = initialize_deepspeed(model, optimizer, configuration(case))
    stepped: dict[Any, Tensor] = {}
    optimizer.before_part.append(
        lambda _: stepped.update({flat_part(p): p.grad.clone() for p in params_of(optimizer) if p.grad is not None})
    )
    for step in range(STEPS):
        micro_batches = []
        for micro_batch in range(2 if case["accumulated"] else 1):
            engine.backward(engine(**batch_of(batch, rank, step, micro_batch)).loss)
            engine.step()
            micro_batches.append(gathered([own.pop(k) for k in range(len(params))]))
        if not case["accumulated"]:
            compare_with_fp64(stepped, micro_batches[0])
        for reference in references.values():
            for param, *parts in zip(params_of(reference), *micro_batches, strict=True):
                param.grad = reduced(parts, param.dtype, case).view(param.shape)
            reference.step()
            if case["clip"]:
                assert torch.equal(torch.as_tensor(engine.get_global_grad_norm()), reference.grad_norm), step
    in_8_bits = compare_parts(optimizer, references, case["state_dtype"])
    with deepspeed.zero.GatheredParameters(params if case["stage"] == 3 else []):
        for k, param in enumerate(params):
            expected = params_of(references[case["state_dtype"]])[k]
            if case["state_dtype"] == torch.int8:
                expected = torch.where(in_8_bits[k].view(param.shape), expected, params_of(references[None])[k])
            assert torch.equal(param, expected), k
    engine.destroy()


def compare_with_fp64(stepped: dict[Any, Tensor], per_rank: list[list[Tensor]]) -> None:
    """The gradients that were stepped are off the exact means by one rounding to BF16, at most 2^-8 of them,
    and by n roundings of an FP32 sum of n terms and its quotient, each at most 2^-24 of all terms together."""
    for part, gradient in stepped.items():
        where = slice(part.start, part.start + gradient.numel())
        terms = torch.stack([whole[where].bfloat16().double() for whole in per_rank[part.number]])
        exact, ranks = terms.mean(0), len(terms)
        bound = 2**-8 * exact.abs() + (1 + 2**-8) * ranks * 2**-24 * terms.abs().sum(0) / ranks
        assert ((gradient.double() - exact).abs() <= bound).all(), part


def compare_parts(optimizer: Any, references: dict[Any, Any], state_dtype: torch.dtype | None) -> list[Tensor]:
    """Compare what this rank holds of each parameter with the optimizer that has it whole.

    Returns:
        For each parameter, of which elements the states are in 8 bits on the rank that holds them.
    """
    parts = []
    for part in params_of(optimizer):
        at = flat_part(part)
        number, start = at.number, at.start
        own = optimizer.state[part]
        in_8_bits = any(value.dtype == torch.uint8 for value in own.values())
        reference = references[None if state_dtype == torch.int8 and not in_8_bits else state_dtype]
        param = params_of(reference)[number]
        end = start + part.numel()
        parts.append((number, start, end, in_8_bits))
        assert torch.equal(part, param.view(-1)[start:end]), parts[-1]
        expected = reference.state[param]
        assert own.keys() == expected.keys(), parts[-1]
        for key, value in own.items():
            elements = param.numel() // expected[key].numel()  # for each of the state: a scale has 32
            whole = expected[key].view(-1)
            if key != "step":
                whole = whole[start // elements : end // elements]
            assert torch.equal(value.view(-1), whole), (parts[-1], key)
    sizes = [param.numel() for param in params_of(reference)]
    marks, held = ([torch.zeros(size, dtype=torch.int32) for size in sizes] for _ in range(2))
    for number, start, end, in_8_bits in itertools.chain(*of_every_rank(parts)):
        held[number][start:end] += 1
        marks[number][start:end] = in_8_bits
    assert all((count == 1).all() for count in held)
    return [mark.bool() for mark in marks]


def check_all() -> None:
    """Check the cases that are for this number of ranks."""
    dist.init_process_group("gloo")
    gc.collect()
    gc.freeze()  # DeepSpeed and checks of the first step visit all objects
    for case in cases():
        if case["ranks"] == dist.get_world_size():
            try:
                check(case)
            except Exception as error:
                error.add_note(str(case))
                raise


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", RANKS if EVERY_CASE else RANKS[:2])
def test_weights_states_and_norms_are_those_of_one_process(ranks):
    """Optimizers, roundings, states, models, param groups, frozen parameters, buckets, accumulation, clipping."""
    on_ranks(check_all, ranks)
