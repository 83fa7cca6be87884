"""Models that transformers shards over a device mesh while loading them: TP, FSDP2, EP and their products."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import ParallelismConfig
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    EuroBertConfig,
    EuroBertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig

import hf_lowprec
from hf_lowprec.integrations.export.checkpoint_export import export_checkpoint
from hf_lowprec.monitor import watched_parameters
from hf_lowprec.reduction import check_replicas
from hf_lowprec.reduction.rank_mean import average_gradients
from tests.support.chosen_cases import EVERY_CASE
from tests.support.processes.ranks import on_ranks
from tests.support.processes.shards import digest, gathered, has_shard_of, local, of_every_rank, shard
from tests.support.training.tiny_trainer import counting_data

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

SIZE = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
"""Most states can be in 8 bits: they need shards whose rows are multiples of 32."""
STEPS = 3
PLACES = ["layers.0.mlp.down_proj", "layers.0.mlp.experts", "layers.0.self_attn.q_norm", "lm_head"]


def build(kind: str, **options: int) -> nn.Module:
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZE | options))
    if kind == "encoder":
        tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id"), 0)
        return EuroBertForMaskedLM(EuroBertConfig(**SIZE | tokens | options))
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZE | experts | options))


def begin(written: str) -> dict[str, int]:
    """Let this rank shard models at load; the arguments of `DistributedConfig` that `written` has."""
    torch._C._get_accelerator = lambda *args: torch.device("cpu")  # which transformers asks for the mesh's device
    ParallelismConfig._validate_accelerator = lambda *args: None  # it refuses CPUs
    if not dist.is_initialized():  # TrainingArguments may have done it
        dist.init_process_group("gloo")
    return {key: int(value) for key, value in (entry.split("=") for entry in written.split(","))}


def load(folder: Path, sizes: dict[str, int] | None) -> nn.Module:
    config = {} if sizes is None else {"distributed_config": DistributedConfig(**sizes)}
    encodes = AutoConfig.from_pretrained(folder).model_type == "eurobert"
    auto = AutoModelForMaskedLM if encodes else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, **config)


def trainer(model: nn.Module, optim: str, **options) -> Trainer:
    AcceleratorState._reset_state()
    name, _, state_dtype = optim.partition(":")
    defaults = {
        "output_dir": "unused", "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
        "optim": name, "optim_args": f"state_dtype={state_dtype}" if state_dtype else None, "learning_rate": 1e-2,
        "weight_decay": 0.1, "max_steps": 4, "logging_steps": 2,
    }  # fmt: skip
    data = counting_data(62)  # the last batch is short
    for number, row in enumerate(data):  # and ranks get different numbers of labels
        row["labels"] = row["labels"].clone()
        row["labels"][: 4 * (number % 4)] = -100
    return Trainer(model, TrainingArguments(**defaults | options), train_dataset=data)


def give_gradients(model: nn.Module, step: int) -> None:
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(crc32(f"{step} {name}".encode()))
        full = torch.randn(param.shape, generator=generator).to(param.dtype)
        sharded = isinstance(param, DTensor)
        param.grad = shard(full, param.device_mesh, param.placements) if sharded else full


def check_steps(folder: Path, sizes: dict[str, int], optim: str) -> None:
    """Weights, states, FP32 estimates and norms are those of the whole model, bit for bit; so is what is measured."""
    models = [load(folder, sizes) for sizes in (sizes, None)]
    optimizers = [trainer(model, optim).create_optimizer() for model in models]
    monitors = [hf_lowprec.PrecisionMonitor(optimizer) for optimizer in optimizers]
    for step in range(STEPS):
        for monitor in monitors if step == STEPS - 1 else ():
            monitor.measure_next_step()
        for model, optimizer in zip(models, optimizers, strict=True):
            give_gradients(model, step)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        sharded, whole = (optimizer.grad_norm for optimizer in optimizers)
        torch.testing.assert_close(sharded, whole, rtol=2**-20, atol=0)
    # All elements are sampled, so that only the order of sums differs.
    measured, of_whole = (monitor.last.sums for monitor in monitors)
    torch.testing.assert_close(measured, of_whole, rtol=1e-9, atol=1e-20, equal_nan=True)
    estimates, expected = (hf_lowprec.fp32_state_dict(*pair) for pair in zip(models, optimizers, strict=True))
    for (name, param), (_, reference) in zip(*(model.named_parameters() for model in models), strict=True):
        assert has_shard_of(param, reference), (optim, name)
        assert has_shard_of(estimates[name], expected[name]), (optim, name)
        states, of_reference = (o.state[p] for o, p in zip(optimizers, (param, reference), strict=True))
        assert states.keys() == of_reference.keys(), (optim, name)
        for key, value in of_reference.items():
            assert has_shard_of(states[key], value), (optim, name, key)


def check_gradients(folder: Path, sizes: dict[str, int], accumulation: str) -> None:
    check_gradients_of_shards(folder, sizes, accumulation)
    check_replicated()


def check_gradients_of_shards(folder: Path, sizes: dict[str, int], accumulation: str) -> None:
    """Three micro-batches, the same on all ranks: gradients are those of the whole model, up to rounding.

    Errors are those of some ten operations in BF16 (√10 · 2^-9) in both models, over sums with cancellation: a few
    percent of the norm. A gradient that was added twice, or divided, is off by a third or more.
    """
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 64, (1, 3), generator=generator) for _ in range(3)]
    models = [load(folder, sizes) for sizes in (sizes, None)]
    for model in models:
        one = trainer(model, "adamw_bf16_split", optim_args=f"grad_accumulation={accumulation}")
        if model is models[0]:
            one.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        for number, batch in enumerate(batches):
            one.accelerator.gradient_state._set_sync_gradients(number == 2)
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(number == 2)
            (model(input_ids=batch, labels=batch).loss / 3).backward()
    for (name, param), reference in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        grad = gathered(param.grad)
        error = (grad.double() - reference.grad.double()).norm() / reference.grad.double().norm()
        assert error < 0.1, (name, float(error))


def change_gradients(module: nn.Module, change: Callable[[str, torch.Tensor], None]) -> None:
    """Call `change` with the name of each own parameter of `module` and what this rank computes for its gradient."""

    def before(module: nn.Module, inputs: tuple) -> None:
        for name, param in module.named_parameters(recurse=False):  # of FSDP2, it is there during the passes only

            def changed(gradient: torch.Tensor, name: str = name) -> torch.Tensor:
                copy = gradient.clone()
                change(name, local(copy))
                return copy

            if param.requires_grad:
                param.register_hook(changed)

    module.register_forward_pre_hook(before)


def check_sums(folder: Path, sizes: dict[str, int]) -> None:
    """Means of different gradients on all ranks are off by one rounding from the exact ones, and by the sum's in FP32.

    In FP32, a sum of n numbers and its division are off by n · 2^-24 · (the sum of their sizes), and one rounding to
    BF16 is by 2^-8 of the number, half a unit in the last place. FP32 gradients are summed in FP64, rounded by 2^-24.
    """
    model = load(folder, sizes)
    trainer(model, "adamw_bf16_split").accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    given: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():

        def give(name: str, gradient: torch.Tensor, path: str = path) -> None:
            generator = torch.Generator().manual_seed(crc32(f"{dist.get_rank()} {path}.{name}".encode()))
            given[f"{path}.{name}"] = gradient.copy_(torch.randn(gradient.shape, generator=generator)).clone()

        change_gradients(module, give)
    model(input_ids=torch.arange(16)[None], labels=torch.arange(16)[None]).loss.backward()
    of_ranks: list[dict[str, torch.Tensor]] = of_every_rank(given)
    for name, param in model.named_parameters():
        ranks, divisor = summed_over(name, param, sizes)
        addends = torch.stack([of_ranks[rank][name] for rank in ranks]).double()
        exact, size = addends.sum(0) / divisor, addends.abs().sum(0) / divisor
        if isinstance(param, DTensor):
            exact, size = (part.chunk(len(ranks))[ranks.index(dist.get_rank())] for part in (exact, size))
        error = (local(param.grad).double() - exact).abs()
        fp32 = param.dtype == torch.float32
        of_sum = len(ranks) * (2**-53 if fp32 else 2**-24) * size
        bound = exact.abs() * (2**-24 if fp32 else 2**-8) + of_sum * (1 + 2**-8)
        assert (error <= bound).all(), (name, float((error / bound).max()))


def summed_over(name: str, param: nn.Parameter, sizes: dict[str, int]) -> tuple[list[int], int]:
    """The ranks whose gradients of a parameter are parts of this rank's, and what their sum is divided by."""
    rank, ranks, apart = dist.get_rank(), dist.get_world_size(), sizes.get("ep_size", 1)
    if "fsdp_size" in sizes:  # of experts, a rank has the gradients for all tokens of its group
        return [*range(rank % apart, ranks, apart)] if "experts" in name else [*range(ranks)], ranks
    if isinstance(param, DTensor):  # parts of TP
        return [rank], 1
    return [*range(ranks)], ranks


def check_replicated() -> None:
    """Gradients that differ between ranks are averaged when they are complete, summed in FP32, and rounded once."""
    param, complete, ranks = nn.Parameter(torch.zeros(5).bfloat16()), [False], dist.get_world_size()
    average_gradients([param], lambda: complete[0])
    of_ranks = torch.randn(ranks, 2, 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    for number, gradient in enumerate(of_ranks[dist.get_rank()]):
        complete[0] = number == 1
        (param * gradient).sum().backward()
    accumulated = of_ranks[:, 0] + of_ranks[:, 1]
    assert torch.equal(param.grad, (accumulated.double().sum(0) / ranks).bfloat16())


class CheckSkips(TrainerCallback):
    """Compares every rank's weights and states before and after each step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.before = digests(model, optimizer.optimizer)

    def on_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        skips = state.global_step == 1  # the second of the steps
        unchanged = [*map(str.__eq__, self.before, digests(model, optimizer.optimizer))]
        assert unchanged == [skips] * dist.get_world_size(), (state.global_step, unchanged)


def check_nonfinite(folder: Path, sizes: dict[str, int]) -> None:
    """One element is NaN of one gradient on the last rank, in the second step: all ranks skip this step alone."""
    for place in ("norm", *PLACES) if EVERY_CASE else ("norm",):  # a replica over TP, whose groups must agree
        model, passes = load(folder, sizes), Counter[str]()
        modules = [module for name, module in model.named_modules() if name.removeprefix("model.") == place]
        if not modules:
            continue

        def spoil(name: str, gradient: torch.Tensor, passes: Counter[str] = passes) -> None:
            passes[name] += 1
            if passes[name] == 2 and dist.get_rank() == dist.get_world_size() - 1:
                gradient.view(-1)[0] = torch.nan

        change_gradients(modules[0], spoil)
        options = {"output_dir": folder, "optim_args": "skip_nonfinite=True", "max_steps": STEPS}
        one = trainer(model, "adamw_bf16_split", **options)
        one.add_callback(CheckSkips())
        one.train()
        skipped = of_every_rank(one.optimizer.optimizer.skipped_steps)
        assert skipped == [1] * dist.get_world_size(), (place, skipped)
        check_replicas(one.model, one.optimizer)


def check_differences(folder: Path, sizes: dict[str, int]) -> None:
    """All ranks name what rank 1 has instead, though accelerate knows only one process of each."""
    frozen = "model.layers.0.mlp.up_proj.weight"
    for told in (f"'{frozen}: .*, frozen' on rank 1", "'weight_decay'. is 0.3 on rank 1 and 0.1 on rank 0"):
        model, odd = load(folder, sizes), dist.get_rank() == 1
        model.get_parameter(frozen).requires_grad_(not (odd and "frozen" in told))
        one = trainer(model, "adamw_bf16_split", use_cpu=False, weight_decay=0.3 if odd and "decay" in told else 0.1)
        with pytest.raises(RuntimeError, match=told):
            one.train()
        assert one.accelerator.num_processes == 1


class CheckNorms(TrainerCallback):
    """Compares the norm by which the step clips with that of the gradients, gathered, in FP64."""

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        full = [gathered(param.grad) for param in model.parameters()]
        self.norm = torch.stack([grad.double().square().sum() for grad in full]).sum().sqrt()

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        torch.testing.assert_close(optimizer.optimizer.grad_norm.double(), self.norm, rtol=2**-20, atol=0)


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Of every rank's parts of weights and states."""
    return of_every_rank(digest(model.parameters(), optimizer, local))


def check_trainer(folder: Path, sizes: dict[str, int], optim: str) -> None:
    found, out = [], folder.parent / optim
    options = {"output_dir": out, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2}
    for resume in (None, str(out / "checkpoint-2")):
        one = trainer(load(folder, sizes), optim, **options, gradient_accumulation_steps=2)
        one.add_callback(CheckNorms())
        one.evaluate(counting_data(8))  # FSDP2 leaves some parameters gathered, which the optimizer must not hold
        one.train(resume_from_checkpoint=resume)
        check_replicas(one.model, one.optimizer)
        found.append(digests(one.model, one.optimizer.optimizer))
    assert found[0] == found[1]
    assert "bfloat16" in {str(param.dtype).removeprefix("torch.") for param in one.model.parameters()}
    if sizes.get("tp_size", 1) > 1:
        norm = one.model.get_parameter("model.norm.weight")
        own = local(norm).detach()
        before = own.clone()
        own[3] += dist.get_rank() % 2
        with pytest.raises(RuntimeError, match=r"replicas differ: model\.norm\.weight on rank"):
            check_replicas(one.model)
        own.copy_(before)
    losses = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1, losses
    estimates = hf_lowprec.fp32_state_dict(one.model, one.optimizer)
    hf_lowprec.save_pretrained(one.model, one.optimizer, out / "exported")
    exported = load(out / "exported", None)
    for name, estimate in estimates.items():
        assert has_shard_of(estimate, exported.state_dict()[name]), name
    if dist.get_world_size() == 4:
        check_other_mesh(folder, {"fsdp_size": 4, **({} if folder.name == "llama" else {"ep_size": 4})}, optim, out)


def check_other_mesh(folder: Path, sizes: dict[str, int], optim: str, out: Path) -> None:
    """A checkpoint of another mesh is loaded as it was saved, bit for bit."""
    exported = load(out / "exported", None)
    one = trainer(load(folder, sizes), optim, output_dir=out)
    one.train(resume_from_checkpoint=str(out / "checkpoint-4"))  # its last step
    for name, estimate in hf_lowprec.fp32_state_dict(one.model, one.optimizer).items():
        assert has_shard_of(estimate, exported.state_dict()[name]), name


def check(action: str, kind: str, written: str, options: str, folder: str) -> None:
    """Call the function `check_ACTION` for each of the options, with a model that is saved in the folder."""
    base, sizes = Path(folder, kind), begin(written)
    watched_parameters.SMALLEST = watched_parameters.LARGEST = 1 << 16
    if dist.get_rank() == 0:
        heads = {"num_attention_heads": 8, "num_key_value_heads": 8} if action == "sums" else {}  # for TP over 8 ranks
        build(kind, **heads).save_pretrained(base)
    dist.barrier()
    for option in options.split(","):
        globals()[f"check_{action}"](base, sizes, *([option] if option else []))


SETUPS = {
    "TP": (2, "llama", "tp_size=2"),
    "FSDP2 x TP": (4, "llama", "fsdp_size=2,tp_size=2"),
    "HSDP": (4, "llama", "dp_replicate_size=2,fsdp_size=2"),
    "FSDP2 x EP": (2, "moe", "fsdp_size=2,ep_size=2"),
    "EP x TP": (2, "moe", "tp_size=2,ep_size=2"),
    "FSDP2 x TP of experts": (4, "moe", "fsdp_size=2,tp_size=2"),
    "FSDP2 of experts": (4, "moe", "fsdp_size=4,ep_size=2"),
    "FSDP2 x TP x EP": (4, "moe", "fsdp_size=2,tp_size=2,ep_size=2"),
    "FSDP2 of an encoder": (2, "encoder", "fsdp_size=2"),
    "8 ranks": (8, "moe", "fsdp_size=4,tp_size=2,ep_size=2"),
}
OF_SUMS = {
    "FSDP2, experts in groups": (8, "moe", "fsdp_size=8,ep_size=2"),
    "TP of 8": (8, "moe", "tp_size=8"),
}


def setups(*chosen: str) -> pytest.MarkDecorator:
    """All setups, of which the short suite runs the `chosen` ones."""
    marked = [pytest.param(name, marks=() if name in chosen else pytest.mark.every_case) for name in SETUPS]
    return pytest.mark.parametrize("setup", marked)


def run(setup: str, action: str, folder: Path, options: str = "") -> None:
    ranks, kind, sizes = (SETUPS | OF_SUMS)[setup]
    on_ranks(check, ranks, action, kind, sizes, options, folder)


MORE = "adamw_bf16_split:int8,adamw_bf16_sr,adamw_bf16_split,adamw_bf16_kahan,muon_bf16_split,adafactor_bf16_split"


@setups("FSDP2 x TP x EP")
@pytest.mark.parametrize(
    "modes", ["adamw_bf16_sr:int8,muon_bf16_split", pytest.param(MORE, marks=pytest.mark.every_case)]
)
def test_steps_are_those_of_the_whole_model(tmp_path, setup, modes):
    """Given the same gradients, bit for bit: weights, states and FP32 estimates; what starts with low bits, too."""
    run(setup, "steps", tmp_path, modes)


@setups("EP x TP")
@pytest.mark.parametrize("accumulation", ["nearest", pytest.param("fp32", marks=pytest.mark.every_case)])
def test_gradients_of_micro_batches_are_those_of_the_whole_model(tmp_path, setup, accumulation):
    run(setup, "gradients", tmp_path, accumulation)


@pytest.mark.every_case
@pytest.mark.parametrize("setup", OF_SUMS)
def test_sums_over_8_ranks_are_rounded_once(tmp_path, setup):
    """Against exact means in FP64."""
    run(setup, "sums", tmp_path)


@pytest.mark.parametrize("setup", ["FSDP2 x TP", pytest.param("FSDP2 of experts", marks=pytest.mark.every_case)])
def test_all_ranks_skip_a_step_with_nan_on_one(tmp_path, setup):
    run(setup, "nonfinite", tmp_path)


def test_ranks_that_differ_tell(tmp_path):
    run("TP", "differences", tmp_path)


@setups("FSDP2 x EP")
@pytest.mark.parametrize("optim", ["adamw_bf16_split", pytest.param("adamw_bf16_sr", marks=pytest.mark.every_case)])
def test_trainer_clips_saves_resumes_and_exports(tmp_path, setup, optim):
    """Bit for bit; a checkpoint of four ranks also goes to another mesh."""
    run(setup, "trainer", tmp_path, optim)
    export_checkpoint(tmp_path / optim / "checkpoint-4", tmp_path / "from files")
    live = load_file(tmp_path / optim / "exported" / "model.safetensors")
    from_files = load_file(tmp_path / "from files" / "model.safetensors")
    assert live.keys() == from_files.keys()
    assert all(torch.equal(tensor, from_files[name]) for name, tensor in live.items())
