"""DeepSpeed's engine in an own loop: checkpoints, and gradients that are not finite; ranks that die or are killed."""

import gc
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import Tensor, nn

import hf_lowprec
from hf_lowprec.integrations.deepspeed.initialize import initialize_deepspeed
from hf_lowprec.monitor.rules import uncast_matrices
from hf_lowprec.optim.param_groups import unwrap_optimizer
from tests.deepspeed.test_steps import batch_of, gathered, mean, params_of
from tests.distributed.test_chaos import IN_8_BITS, lose_nothing
from tests.distributed.test_lost_ranks import check_death
from tests.support.chosen_cases import EVERY_CASE
from tests.support.models import tiny_models
from tests.support.planted_pickles import plant
from tests.support.processes.ranks import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

STAGES = (1, 2, 3)
SAVED, STEPS = 2, 3


def model_in_fp32() -> nn.Module:
    """A model all of whose weights have low bits, norms included."""
    model, _ = tiny_models.llama()
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        param.data += 1e-3 * torch.randn(param.shape, generator=generator)
    return model


def engine_of(
    stage: int, rounding: str, stock: bool = False, looks: bool = True, clip=0.0, frozen: str = "", **options: Any
):
    """DeepSpeed's engine around a new model, with AdamW: that of torch if `stock` is set. `looks`: for NaN."""
    model = model_in_fp32()
    if frozen:
        model.get_submodule(frozen).requires_grad_(False)
    hf_lowprec.cast_model(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": clip,  # 1 by default
        "bf16": {"enabled": True, "check_grad_overflow": looks},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 1500},  # of 1024, 2048 or 3072
    }
    if stock:
        config["zero_allow_untested_optimizer"] = True
        return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)[0]
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-2, rounding=rounding, state_dtype=torch.float32, **options)
    return initialize_deepspeed(model, optimizer, config)[0]


def train(engine, steps: range, gradients: list | None = None) -> list[float]:
    """Train with a learning rate that falls; returns losses. `gradients` gets, for every step, their means by name."""
    _, batch = tiny_models.llama()
    own: dict[str, Tensor] = {}
    hooks = []
    for name, param in engine.module.named_parameters():
        take = lambda gradient, name=name: own.update({name: gradient.detach().clone().view(-1)})  # noqa: E731
        hooks += [param.register_hook(take)] if gradients is not None else []
    losses = []
    for step in steps:
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        loss = engine(**batch_of(batch, dist.get_rank(), step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if gradients is not None:
            gradients.append(dict(zip(own, map(mean, gathered(list(own.values()))), strict=True)))
    for hook in hooks:
        hook.remove()
    return losses


def states(engine) -> list[Tensor]:
    """Copies of the states of this rank's parts."""
    optimizer = unwrap_optimizer(engine.optimizer)
    every = ((optimizer.state[part], key) for part in params_of(optimizer) for key in sorted(optimizer.state[part]))
    return [state[key].clone() for state, key in every]


def contents(engine) -> list[Tensor]:
    """Copies of this rank's weights and states, and of the weights that the model computes with."""
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params if engine.zero_optimization_stage() == 3 else []):
        parts = params_of(unwrap_optimizer(engine.optimizer))
        return [*(param.detach().clone() for param in (*parts, *params)), *states(engine)]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def check_resume(folder: str, stage: int) -> None:
    """The rest of a run is the same if it is resumed, and the checkpoint holds its FP32 weights."""
    rounding = "kahan" if stage == 3 else "split"
    whole, gradients = engine_of(stage, rounding), []
    train(whole, range(SAVED), gradients)
    whole.save_checkpoint(folder)
    saved = contents(whole)
    losses = train(whole, range(SAVED, STEPS))
    resumed = engine_of(stage, rounding)
    resumed.load_checkpoint(folder)
    assert same(contents(resumed), saved), "loaded"
    assert train(resumed, range(SAVED, STEPS)) == losses
    assert same(contents(resumed), contents(whole)), "resumed"


def check_fp32_weights(folder: str, stage: int) -> None:
    """With split, those of FP32 training; with Kahan, weight + compensation of one process."""
    for rounding in ("split", "kahan"):
        engine, gradients = engine_of(stage, rounding), []
        train(engine, range(SAVED), gradients)
        engine.save_checkpoint(f"{folder}/{rounding}")
        alone = model_in_fp32()
        if rounding == "kahan":
            hf_lowprec.cast_model(alone)
        optimizer = hf_lowprec.AdamW(alone.parameters(), lr=1e-2, rounding=rounding, state_dtype=torch.float32)
        for step, means in enumerate(gradients):
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            for name, param in alone.named_parameters():
                param.grad = means[name].to(param.dtype).view(param.shape)
            optimizer.step()
        if dist.get_rank() == 0:
            weights = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/{rounding}")
            for name, param in alone.named_parameters():
                expected = param.float()
                if param.dtype == torch.bfloat16:
                    expected = expected + optimizer.state[param]["compensation"].float()
                assert weights[name].dtype == torch.float32 and torch.equal(weights[name], expected), (rounding, name)
        dist.barrier()


def check_refused(folder: str, stage: int, reason: str, look: Callable[[Any], list[Tensor]]) -> None:
    """The checkpoint in `folder` is not loaded. It does not change, nor does what `look` returns of an engine."""
    engine = engine_of(stage, "split")
    train(engine, range(1))
    before, files = look(engine), written(folder)
    with pytest.raises(ValueError, match=reason):
        engine.load_checkpoint(folder)
    assert same(look(engine), before)
    assert written(folder) == files


def written(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def check_stock(folder: str, stage: int) -> None:
    """Checkpoints of torch's AdamW are refused, though DeepSpeed has loaded their weights by then."""
    stock = engine_of(stage, "split", stock=True)
    train(stock, range(1))
    stock.save_checkpoint(folder)
    check_refused(folder, stage, "not saved by hf_lowprec", states)


def check_files(folder: str, stage: int) -> None:
    """No file is run, or missing without being named, and `latest` names nothing else. Nothing changes then."""
    engine, checkpoint, marker = engine_of(stage, "split"), Path(folder, "checkpoint"), Path(folder, "marker")
    engine.save_checkpoint(str(checkpoint), client_state={"rng": np.random.get_state(), "sum": np.ones(2).sum()})
    engine.save_checkpoint(f"{folder}/evil")
    before, latest = contents(engine), checkpoint / "latest"
    cases = [(latest, lambda path: path.write_text("../evil"), "'../evil', which is outside")]
    cases += [(latest, lambda path: path.write_text("nothing"), "/nothing' is not a checkpoint of DeepSpeed")]
    for file in [*checkpoint.rglob("*_states.pt")]:
        cases += [(file, lambda path: plant(path, marker), f"{file.name} cannot be read: it names io.open")]
        cases += [(file, Path.unlink, f"a complete checkpoint of 2 ranks under ZeRO {stage}: {file.name} is missing")]
    for file, change, said in cases:
        if dist.get_rank() == 0:
            content = file.read_bytes()
            change(file)
        dist.barrier()
        for act in (engine.load_checkpoint, lambda path: hf_lowprec.export_checkpoint(path, f"{path}-out")):
            with pytest.raises(ValueError, match=re.escape(said)):
                act(str(checkpoint))
        dist.barrier()
        if dist.get_rank() == 0:  # the other ranks would write what rank 0 reads
            file.write_bytes(content)
    dist.barrier()
    assert same(contents(engine), before) and not marker.exists()
    engine.load_checkpoint(str(checkpoint))


def check_ranks_that_differ(folder: str, stage: int) -> None:
    """They are told before they communicate."""
    cases = {
        "param_groups[0]['weight_decay'] is 0.5 on rank 1 and": {"weight_decay": 0.5},
        "max_grad_norm is 2.0 on rank 1 and None": {"max_grad_norm": 2.0},
        "'model.norm.weight: float32 (32,), frozen' on rank 1 and": {"frozen": "model.norm"},
        "gradient_clipping of DeepSpeed's configuration is 0.5 on rank 1 and 0.0": {"clip": 0.5},
    }
    for said, odd in cases.items():
        with pytest.raises(RuntimeError, match=re.escape(said)):
            engine_of(stage, "split", **(odd if dist.get_rank() == 1 else {}))


class Classifier(nn.Module):
    """Its frozen vector is kept in FP32 for its loss, its frozen matrix is not. Its number loses digits."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = model_in_fp32(), nn.Parameter(torch.full((1,), 0.3))
        self.class_weight = nn.Parameter(torch.rand(4), requires_grad=False)
        self.weight = nn.Parameter(torch.rand(4, 8), requires_grad=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(x @ self.weight.T, labels, self.class_weight)


def check_shapes(folder: str, stage: int) -> None:
    """`zero.Init` leaves parameters empty; what depends on their shapes must not change."""
    decided = []
    for partitioned in (False, True):
        model = Classifier()
        if partitioned:
            deepspeed.zero.Init(module=model, dtype=torch.float32)
        names = {param: name for name, param in model.named_parameters()}
        matrices = hf_lowprec.hidden_matrices(model)
        report = hf_lowprec.cast_model(model)
        model.body.model.layers[0].mlp.up_proj.float()
        decided.append([[names[param] for param in matrices], str(report), uncast_matrices(model)])
    if dist.get_rank() == 0:  # the only one to know a number
        assert decided[0] == decided[1] and all(decided[0]), decided


def check_nonfinite(folder: str, stage: int) -> None:
    """NaN on one rank: with `skip_nonfinite` the step leaves no trace and is counted; without, DeepSpeed skips it as
    well, unless it is told not to look, which ZeRO 3 does anyway."""
    for skips, looks in ((True, True), (False, True), (False, False))[: 3 if stage < 3 else 2]:
        engine, other = (engine_of(stage, "split", looks=looks, skip_nonfinite=skips) for _ in range(2))
        for each in (engine, other):
            train(each, range(1))
        before = contents(engine)
        if dist.get_rank() == 1:
            spoil = engine.module.model.layers[0].mlp.up_proj.weight.register_hook(lambda grad: grad * torch.nan)
        train(engine, range(1, 2))
        if dist.get_rank() == 1:
            spoil.remove()
        if stage < 3 and not (skips or looks):
            assert any(tensor.isnan().any() for tensor in contents(engine))
            continue
        assert same(contents(engine), before)
        assert unwrap_optimizer(engine.optimizer).skipped_steps == int(skips)
        assert train(engine, range(2, 3)) == train(other, range(2, 3))
        assert same(contents(engine), contents(other))


CHECKS = {
    check_resume: (2, 3),
    check_files: (3,),
    check_ranks_that_differ: (2,),
    check_shapes: (3,),
    check_fp32_weights: (2, 3),
    check_stock: (3,),
    check_nonfinite: (1, 3),
}
"""With the stages in the short suite: ZeRO 1 and 2 share most of their code."""


def check(folder: str) -> None:
    dist.init_process_group("gloo")
    gc.collect()
    gc.freeze()
    warnings.simplefilter("ignore")
    for stage in STAGES:
        if dist.get_world_size() == 2:
            for each, stages in CHECKS.items():
                if stage in stages or (EVERY_CASE and each is not check_shapes):
                    each(f"{folder}/{each.__name__} {stage}", stage)
        elif EVERY_CASE or stage == 3:
            reason = f"was saved by 2 ranks under ZeRO {stage}, and this run has 3"
            check_refused(f"{folder}/check_resume {stage}", stage, reason, contents)


def test_checkpoints_and_nonfinite_gradients(tmp_path):
    """Runs resume bit for bit, DeepSpeed's tools find all bits of FP32 weights, other checkpoints are refused, NaN on
    one rank stops all."""
    for ranks in (2, 3):
        on_ranks(check, ranks, tmp_path)


@pytest.mark.timeout(400)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are watched through /proc")
@pytest.mark.parametrize("kind", [pytest.param("zero2", marks=pytest.mark.every_case), "zero3"])
def test_a_rank_dies(processes, store, kind):
    """In the middle of a backward pass: the others end with an error, they do not hang."""
    check_death(processes, store, kind)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("kind", "optim", "options"),
    [
        ("zero1", "adamw_bf16_split", []),
        ("zero2", "adamw_bf16_kahan", [IN_8_BITS]),
        ("zero3", "adamw_bf16_split", []),
        ("zero2", "muon_bf16_split", []),
    ],
)
def test_nothing_is_lost_by_kills(kind, optim, options, tmp_path):
    """Mostly while ranks save; a resumed run ends with the same bits all the same."""
    lose_nothing((kind, optim, options), tmp_path)
