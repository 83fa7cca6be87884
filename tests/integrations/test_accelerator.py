"""`prepare_accelerator` in one process: what it refuses, what it changes, what it says. Several processes are in
`tests/distributed`."""

import copy
import inspect
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.commands.launch import launch_command_parser
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ParallelismConfig,
)
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

import hf_lowprec
from hf_lowprec.integrations.accelerate import private_apis, rank_comparison
from hf_lowprec.integrations.carry_low_bits import give_low_bits, taken_low_bits
from hf_lowprec.reduction.fsdp2 import check_nccl
from hf_lowprec.reduction.reduction_status import ReductionStatus
from hf_lowprec.rounding.attached_low_bits import attached_low_bits
from tests.support.training.tiny_trainer import arguments, counting_data, llama


@pytest.fixture(autouse=True)
def fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()  # it holds data loaders, which do not pickle once they have run
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class CountingClips(Accelerator):
    """An accelerator of a user."""

    clips = 0

    def clip_grad_norm_(self, *args, **kwargs):
        self.clips += 1
        return super().clip_grad_norm_(*args, **kwargs)


def accelerator(kind: DistributedType = DistributedType.NO, cls: type = Accelerator, **settings) -> Accelerator:
    built = cls(cpu=True, **settings)
    built.state.distributed_type = kind
    return built


def fsdp(**settings) -> Accelerator:
    built = accelerator(DistributedType.FSDP)
    built.state.fsdp_plugin = FullyShardedDataParallelPlugin(**settings)
    return built


def changed(built: Accelerator, **state) -> Accelerator:
    """The accelerator with other attributes of its state."""
    for name, value in state.items():
        setattr(built.state, name, value)
    return built


def synchronizing() -> Accelerator:
    return accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=True))


def communicating(hook: str) -> Accelerator:
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType[hook])
    return accelerator(kwargs_handlers=[handler])


POLICY = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
HSDP = {"dp_replicate_size": 2, "dp_shard_size": 2}
DDP_OR_FSDP2 = r"use DDP .*or FSDP2 .*--fsdp_version 2"
BY_NCCL, FP32_SUMS = {"reduction": "nccl"}, {"grad_accumulation": "fp32"}
REFUSED = [
    # an accelerator, the arguments of prepare_accelerator, and words of the message
    (lambda: accelerator(DistributedType.MEGATRON_LM), {}, rf"=MEGATRON_LM.*remove MegatronLMPlugin.* {DDP_OR_FSDP2}"),
    (lambda: accelerator(DistributedType.XLA), {}, rf"=XLA.*remove distributed_type=XLA.* {DDP_OR_FSDP2}"),
    (lambda: accelerator(DistributedType.MULTI_NPU), {}, rf"remove distributed_type=MULTI_NPU.* {DDP_OR_FSDP2}"),
    (lambda: fsdp(fsdp_version=1), {}, r"FSDP1.*fsdp_version: 2.*--fsdp_version 2"),
    (lambda: fsdp(fsdp_version=2, mixed_precision_policy=POLICY), {}, "mixed_precision_policy"),
    (accelerator, BY_NCCL, r"'nccl' .*distributed_type=NO; use FSDP2 .*'rank_order'"),
    (lambda: accelerator(DistributedType.MULTI_GPU), BY_NCCL, r"'nccl' .*=MULTI_GPU; use FSDP2 .*'rank_order'"),
    (lambda: fsdp(fsdp_version=2), BY_NCCL | FP32_SUMS, r"impossible with grad_accumulation='fp32'.*'rank_order'"),
    (
        lambda: changed(fsdp(fsdp_version=2), parallelism_config=ParallelismConfig(**HSDP)),
        BY_NCCL,
        r"'nccl' is impossible with dp_replicate_size > 1 \(HSDP\).*'rank_order'",
    ),
    (lambda: changed(accelerator(DistributedType.MULTI_GPU), parallelism_config=SimpleNamespace(cp_size=2)), {},
     r"ParallelismConfig\(cp_size=2\).*need FSDP2"),
    (lambda: changed(accelerator(DistributedType.MULTI_GPU), parallelism_config=SimpleNamespace(sp_size=2)), {},
     r"ParallelismConfig\(sp_size=2\).*dp_shard_size"),
    (lambda: communicating("BF16"), {}, "comm_hook='bf16'.*remove it"),
    (lambda: communicating("POWER_SGD"), {}, "comm_hook='power_sgd'.*remove it"),
    (lambda: changed(accelerator(), _mixed_precision="fp16"), {}, "mixed_precision='fp16'"),
    (synchronizing, FP32_SUMS, "sync_each_batch=True"),
    (accelerator, {"grad_accumulation": "exact"}, "'exact' is unknown; valid are 'nearest', 'fp32'"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "options", "message"), REFUSED)
def test_what_cannot_be_reduced_as_asked_is_refused(build, options, message):
    with pytest.raises(ValueError, match=message):
        hf_lowprec.prepare_accelerator(build(), **options)


def test_synchronizing_every_micro_batch_is_possible_where_it_rounds_no_more_than_sums_do():
    hf_lowprec.prepare_accelerator(synchronizing())


def test_sums_by_nccl_are_refused_without_nccl(two_fake_ranks, monkeypatch):
    with pytest.raises(ValueError, match=r"'nccl' is impossible: gradients are on 'cpu'.*'rank_order'"):
        hf_lowprec.prepare_accelerator(fsdp(fsdp_version=2), reduction="nccl")
    with pytest.raises(ValueError, match=r"backend .*fake.*'rank_order'"):
        check_nccl("cuda")
    monkeypatch.delattr(FSDPModule, "set_symm_mem_for_comm")
    with pytest.raises(ValueError, match=r"FSDP2 of torch 2\..*'rank_order'"):
        check_nccl("cuda")


def test_tensor_parallelism_of_accelerate_is_refused():
    built = accelerator(DistributedType.MULTI_GPU)
    built.state.parallelism_config = SimpleNamespace(tp_size=2, dp_replicate_enabled=False, cp_enabled=False)
    hf_lowprec.prepare_accelerator(built)
    with pytest.raises(ValueError, match=r"ParallelismConfig\(tp_size=2\).*DistributedConfig\(tp_size=2\)"):
        built.prepare(nn.Linear(2, 2))


def test_pipelines_of_models_sharded_at_load_are_refused():
    model = nn.Linear(2, 2)
    model.is_distributed_loading_by_transformers = True
    model.config = SimpleNamespace(distributed_config=SimpleNamespace(pp_size=2, dp_size=1))
    built = accelerator()
    hf_lowprec.prepare_accelerator(built)
    with pytest.raises(ValueError, match=r"DistributedConfig\(pp_size=2\): pipeline"):
        built.prepare(model)


def test_several_gpus_in_one_process_are_refused(tmp_path):
    args = arguments(tmp_path, optim="adamw_bf16_kahan")
    args._n_gpu = 2
    assert args.n_gpu == 2
    with pytest.raises(ValueError, match=r"one process with 2 GPUs.*accelerate launch.*CUDA_VISIBLE_DEVICES"):
        Trainer(model=llama(), args=args, train_dataset=counting_data())


def test_a_model_that_fsdp2_cannot_group_is_refused_before_its_optimizer_is_touched():
    """Accelerate takes the parameters out of the optimizer, and puts shards in their place at the end."""
    model = nn.Linear(4, 4).bfloat16()
    model.bias.data = model.bias.data.float()
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=0.1)
    built = fsdp(fsdp_version=2)
    hf_lowprec.prepare_accelerator(built)
    with pytest.raises(ValueError, match=r"Linear has weight in bfloat16, bias in float32; use DDP"):
        built.prepare(model, optimizer)
    assert optimizer.param_groups[0]["params"] == [model.weight, model.bias]
    assert private_apis.prepared_models(built) == []


def test_a_model_that_was_prepared_before_is_refused(one_rank):
    built = accelerator()
    model = built.prepare(DistributedDataParallel(nn.Linear(2, 2)))
    assert private_apis.prepared_models(built) == [model]
    with pytest.raises(ValueError, match=r"call prepare_accelerator before accelerator\.prepare"):
        hf_lowprec.prepare_accelerator(built)


@pytest.mark.parametrize(
    ("settings", "grad_accumulation", "reason"),
    [
        ({"mixed_precision": "bf16"}, "nearest", "prepared with mixed precision, so it runs under autocast"),
        ({}, "fp32", "prepared without grad_accumulation='fp32'"),
    ],
)
def test_a_model_that_was_prepared_before_and_would_train_as_it_is(settings, grad_accumulation, reason):
    """In one process no wrapper gives it away: autocast would stay on, micro-batches would be added up in 16 bits."""
    built = accelerator(**settings)
    model = nn.Linear(64, 64)
    hf_lowprec.cast_model(model)
    model, _ = built.prepare(model, hf_lowprec.AdamW(model.parameters(), lr=1e-3))
    before, hooks = dict(vars(built)), dict(model._forward_hooks)
    with pytest.raises(ValueError, match=rf"{reason}; call prepare_accelerator before accelerator\.prepare"):
        hf_lowprec.prepare_accelerator(built, grad_accumulation)
    assert (vars(built), model._forward_hooks) == (before, hooks)
    assert built.mixed_precision == settings.get("mixed_precision", "no")


def test_what_was_prepared_before_in_one_process_and_can_still_be_changed():
    """A cast model without autocast returns FP32 from then on; an optimizer makes no difference."""
    built = accelerator()
    model = llama()
    hf_lowprec.cast_model(model)
    model, _ = built.prepare(model, hf_lowprec.AdamW(model.parameters(), lr=1e-3))
    hf_lowprec.prepare_accelerator(built)
    assert model(input_ids=counting_data(1)[0]["input_ids"][None]).logits.dtype == torch.float32


@pytest.mark.parametrize("order", ["prepare_accelerator, prepare", "prepare, prepare_accelerator"])
def test_a_cast_after_prepare_is_refused(order):
    """In several processes DDP or FSDP2 wraps the model; in one, nothing else would tell."""
    built, model = accelerator(), llama()
    for line in order.split(", "):
        if line == "prepare":
            built.prepare(model, hf_lowprec.AdamW(model.parameters(), lr=1e-3))
        else:
            hf_lowprec.prepare_accelerator(built)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"call cast_model\(model\) before accelerator\.prepare"):
        hf_lowprec.cast_model(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    hf_lowprec.cast_model(copy.deepcopy(model))  # a copy was not prepared


def test_a_cast_that_is_repeated_after_prepare_and_one_of_a_model_that_was_only_evaluated():
    built, model, judge = accelerator(), llama(), llama()
    hf_lowprec.prepare_accelerator(built)
    hf_lowprec.cast_model(model)
    built.prepare_model(judge, evaluation_mode=True)
    built.prepare(model, hf_lowprec.AdamW(model.parameters(), lr=1e-3))
    assert not hf_lowprec.cast_model(model).changed
    assert hf_lowprec.cast_model(judge).changed


def test_preparing_twice_changes_nothing():
    built = accelerator()
    first = hf_lowprec.prepare_accelerator(built)
    before = dict(vars(built))
    assert hf_lowprec.prepare_accelerator(built) is first
    assert vars(built) == before
    with pytest.raises(ValueError, match="was already prepared with grad_accumulation='nearest'"):
        hf_lowprec.prepare_accelerator(built, grad_accumulation="fp32")
    with pytest.raises(ValueError, match="was already prepared with reduction='rank_order'"):
        hf_lowprec.prepare_accelerator(built, reduction="nccl")


def test_autocast_left_on_by_habit_is_off_and_said_once(caplog):
    built = accelerator(mixed_precision="bf16")
    reduction = hf_lowprec.prepare_accelerator(built)
    assert built.mixed_precision == "no"
    assert not built.native_amp
    said = [record.message for record in caplog.records] + str(reduction).splitlines()
    assert sum("mixed precision: 'bf16'" in line for line in said) == 1
    seen = []

    class Look(nn.Linear):
        def forward(self, inputs):
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(inputs)

    built.prepare(Look(2, 2))(torch.ones(1, 2))
    assert seen == [False]


def test_other_accelerators_are_left_alone():
    """Though accelerate gives all accelerators one state."""
    others = [accelerator(DistributedType.FSDP, mixed_precision="bf16")]
    others[0].state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=POLICY)
    ours = accelerator(DistributedType.FSDP)
    hf_lowprec.prepare_accelerator(ours)
    assert (ours.mixed_precision, ours.state.fsdp_plugin.mixed_precision_policy) == ("no", None)
    others.append(accelerator(DistributedType.FSDP, mixed_precision="bf16"))
    for other in others:
        assert not any("hf_lowprec" in name for name in vars(other))
        assert (other.mixed_precision, other.state.fsdp_plugin.mixed_precision_policy) == ("bf16", POLICY)
        assert other.native_amp


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ("WORLD_SIZE=4", ["4 processes were started (WORLD_SIZE), but accelerate trains with 1: each trains alone"]),
        ("", ["accelerate launch was asked for several processes and has started 1"]),
        ("WORLD_SIZE=1", []),
    ],
)
def test_processes_that_train_alone_are_pointed_out(monkeypatch, variables, found):
    """In the environment that `accelerate launch --cpu --num_processes 2` makes, with what torchrun adds to it."""
    words = "--cpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no script.py"
    _, environment = prepare_simple_launcher_cmd_env(launch_command_parser().parse_args(words.split()))
    built = accelerator()
    for name, value in (*environment.items(), *(pair.split("=") for pair in variables.split())):
        monkeypatch.setenv(name, value)
    notes = hf_lowprec.prepare_accelerator(built).notes
    assert [text in note for text, note in zip(found, notes, strict=True)] == [True] * len(found)


def summed(model: nn.Module, rows: torch.Tensor, name: str) -> torch.Tensor:
    """The FP32 sum of the gradients of a parameter for each of `rows`, rounded once."""
    model, total = copy.deepcopy(model), torch.zeros(())
    for row in rows:
        model.zero_grad()
        model(row).float().square().sum().backward()
        total = total + model.get_parameter(name).grad.float()
    return total.bfloat16()


@pytest.mark.parametrize("change", ["none", "unfrozen", "replaced"])
def test_micro_batches_add_up_in_fp32(change):
    """Also for parameters that become trainable after `prepare`. The BF16 sum, which `nearest` gives, differs."""
    torch.manual_seed(0)
    rows = torch.randn(64, 1, 8, dtype=torch.bfloat16)
    built = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(torch.bfloat16)

    def gradient(mode):
        model, ours = copy.deepcopy(built), accelerator()
        model[0].requires_grad_(change != "unfrozen")
        hf_lowprec.prepare_accelerator(ours, mode)
        prepared = ours.prepare(model)
        ours.backward(prepared(rows[0]).float().square().sum())
        model.zero_grad()
        if change == "unfrozen":
            model[0].requires_grad_()
        elif change == "replaced":
            model[0].weight = nn.Parameter(model[0].weight.detach().clone())
        for row in rows:
            ours.backward(prepared(row).float().square().sum())
        return model[0].weight.grad

    expected = summed(built, rows, "0.weight")
    assert torch.equal(gradient("fp32"), expected)
    assert not torch.equal(gradient("nearest"), expected)


def test_micro_batches_that_were_not_accumulated_as_asked_for_are_an_error():
    built = lowprec()
    with_a_model(built)
    (model,), (optimizer,) = private_apis.prepared_models(built), private_apis.prepared_optimizers(built)
    model(torch.ones(1, 32, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(RuntimeError, match=r"accelerator\.backward\(loss\).*instead of loss\.backward\(\)"):
        optimizer.step()
    built.backward(model(torch.ones(1, 32, dtype=torch.bfloat16)).sum())
    optimizer.step()


def clipped(parameters_of, max_norm: float):
    built = accelerator(cls=CountingClips)
    hf_lowprec.prepare_accelerator(built)
    model = nn.Linear(64, 64).bfloat16()
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=0.1)
    model, optimizer = built.prepare(model, optimizer)
    model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    before = [param.grad.clone() for param in model.parameters()]
    norm = built.clip_grad_norm_(parameters_of(model), max_norm)
    assert built.clips == 1
    return model, optimizer.optimizer, before, float(norm)


def test_all_parameters_are_clipped_in_the_step_by_an_exact_norm():
    model, optimizer, before, norm = clipped(lambda model: model.parameters(), 0.5)
    exact = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in before))
    assert norm == pytest.approx(exact, rel=2**-24)  # FP64 sums, one rounding to FP32
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), before, strict=True))
    assert optimizer.limit == 0.5
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.limit is None


def test_a_part_of_them_is_clipped_as_accelerate_does():
    model, optimizer, before, _ = clipped(lambda model: [model.weight], 0.5)
    assert optimizer.limit is None
    assert float(model.weight.grad.norm()) == pytest.approx(0.5, rel=2**-6)
    assert torch.equal(model.bias.grad, before[1])


def stock(**settings) -> Accelerator:
    return accelerator(**settings)


def lowprec(**settings) -> Accelerator:
    built = accelerator(**settings)
    hf_lowprec.prepare_accelerator(built, grad_accumulation="fp32")
    return built


def with_a_model(built: Accelerator) -> Accelerator:
    torch.manual_seed(0)
    model = nn.Linear(32, 32).bfloat16()
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(8, 32), batch_size=2)
    built.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), loader)
    return built


@pytest.mark.parametrize("also", [False, True])
def test_what_was_prepared_is_in_force_after_unpickling(also):
    """On the copy's own models, and not on those of the accelerator that it is a copy of."""
    built = with_a_model(lowprec(cls=CountingClips)) if also else lowprec()
    found = pickle.loads(pickle.dumps(built))
    if not also:
        with_a_model(found)
    (model,), (optimizer,) = private_apis.prepared_models(found), private_apis.prepared_optimizers(found)
    assert model not in private_apis.prepared_models(built)
    reduction = hf_lowprec.prepare_accelerator(found, grad_accumulation="fp32")
    assert reduction is not hf_lowprec.prepare_accelerator(built, grad_accumulation="fp32")
    assert len(reduction.accumulators) == 1
    rows = torch.randn(8, 4, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    for row in rows:
        found.backward(model(row).float().square().sum())
    assert torch.equal(model.weight.grad, summed(model, rows, "weight"))
    assert float(found.clip_grad_norm_(model.parameters(), 0.5)) > 0.5
    assert optimizer.limit == 0.5
    assert getattr(found, "clips", 0) == also
    assert found.prepare_model(model) is model
    assert len(reduction.accumulators) == 1  # the copy knows what it has prepared
    assert inspect.signature(found.prepare_model) == inspect.signature(stock().prepare_model)


def test_a_trainers_accelerator_pickles(tmp_path):
    """Before it trains; from then on accelerate's own state holds what does not pickle."""
    trainer = Trainer(llama(), arguments(tmp_path, optim="adamw_bf16_kahan"), None, counting_data())
    found = pickle.loads(pickle.dumps(trainer.accelerator))
    reference = nn.Linear(2, 2)
    found.prepare_model(reference, evaluation_mode=True)
    assert reference.weight.dtype == torch.bfloat16  # as the callback has it


def test_modules_that_are_sharded_first_are_taken_out_of_every_call(monkeypatch):
    calls = []
    monkeypatch.setattr(torch_fsdp, "fully_shard", lambda module, **options: calls.append((module, options)))
    first, second, third = (nn.Linear(2, 2) for _ in range(3))
    with private_apis.before_fully_shard(lambda options: calls.append(options) or {first}):
        torch_fsdp.fully_shard([first, second], mesh=None)
        assert torch_fsdp.fully_shard(first, mesh=None) is first
        assert torch_fsdp.fully_shard([first], mesh=None) == [first]
        torch_fsdp.fully_shard(third)
    assert calls == [{"mesh": None}, ([second], {"mesh": None}), (third, {})]


def test_micro_batches_that_are_clipped_one_by_one_follow_accelerates_own_loop():
    """Clipping before the last micro-batch scales what is there, to which the next is added."""
    trained = []
    for ours in (True, False):
        built = Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        if ours:
            hf_lowprec.prepare_accelerator(built)
            optimizer = hf_lowprec.SGD(model.parameters(), lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = built.prepare(model, optimizer)
        for step in range(4):
            with built.accumulate(model):
                built.backward(model(torch.full((2, 8), 1.0 + step)).square().sum())
                built.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        trained.append(list(model.parameters()))
    # Two norms of 72 numbers a step, two factors; weights of up to 1.
    for mine, other in zip(*trained, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=2 * 80 * 2**-24)


def test_an_accelerate_that_shards_by_another_function_is_an_error():
    original, before = torch_fsdp.fully_shard, private_apis.before_fully_shard(lambda options: set())
    with pytest.raises(RuntimeError, match=r"without torch\.distributed\.fsdp\.fully_shard"), before:
        assert torch_fsdp.fully_shard is not original
    assert torch_fsdp.fully_shard is original


def test_low_bits_survive_a_prepare_that_fails():
    ours = fsdp(fsdp_version=2)
    model = nn.Linear(8, 8)
    hf_lowprec.cast_model(model)
    before = attached_low_bits(model.weight).clone()
    hf_lowprec.prepare_accelerator(ours)
    with pytest.raises(ValueError, match="optimizer"):
        ours.prepare(model)
    assert torch.equal(attached_low_bits(model.weight), before)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["layer", "module"])
def test_ddp_has_a_prefix_that_names_in_the_model_may_have_as_well(one_rank, name, compiled):
    model = nn.ModuleDict({name: nn.Linear(8, 8)})
    hf_lowprec.cast_model(model)
    before = {param: attached_low_bits(param) for param in model.parameters()}
    with taken_low_bits(model) as kept:
        assert not any(attached_low_bits(param) is not None for param in before)
        wrapped = DistributedDataParallel(model)
    give_low_bits(torch.compile(wrapped) if compiled else wrapped, kept, torch.device("cpu"))
    assert all(torch.equal(attached_low_bits(param), expected) for param, expected in before.items())


@pytest.mark.parametrize("before_step", [True, False], ids=["before the step", "when gradients are clipped"])
def test_it_runs_once_and_other_hooks_run_too(monkeypatch, before_step):
    compared, others = [], []
    monkeypatch.setattr(rank_comparison, "trains_on_several_ranks", lambda *_: compared.append("ran"))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    comparison = rank_comparison.RankComparison(
        SimpleNamespace(num_processes=2, gradient_state=None), ReductionStatus("nearest")
    )
    comparison.watch(optimizer, [])
    optimizer.register_step_pre_hook(lambda *_: others.append("ran"))
    if not before_step:
        comparison.compare(optimizer, 1.0)
    optimizer.step()
    optimizer.step()
    assert compared == ["ran"] and others == ["ran"] * 2
