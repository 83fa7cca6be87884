"""The plan of a cast, its report, and what else happens to a cast model: copies, compilers, wrappers, further casts."""

import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from hf_lowprec.casting import cast_model, make_plan, return_float32, uncast_model
from hf_lowprec.casting.cast_plan import HookPlan
from hf_lowprec.rounding.attached_low_bits import attached_low_bits
from tests.support.models import tiny_models
from tests.support.models.inspection import (
    BF16,
    COPIES,
    FP16,
    FP32,
    NORM_PATH,
    assert_same_bits,
    bits,
    copy_of,
    dtypes,
    fp32_names,
    gradient_dtypes,
    hook_counts,
    norm_modules,
    output_dtypes,
)
from tests.support.models.norm_layers import ScaleRMSNorm
from tests.support.models.tiny_models import ARCHITECTURES


class Net(nn.Module):
    """A part for several rules: cast, kept by class, kept by the caller, not floating."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, bias=False)
        self.norm = nn.LayerNorm(4, bias=False)
        self.lm_head = nn.Linear(4, 2, bias=False)
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(self.proj(x)))


def test_a_plan_has_a_reason_for_every_tensor_and_hook() -> None:
    plan = make_plan(Net(), BF16, ["lm_head"])
    assert {tensor.name: (tensor.action, tensor.dtype, tensor.reason) for tensor in plan.tensors} == {
        "steps": ("leave", torch.int64, "Tensor of torch.int64"),
        "proj.weight": ("cast", BF16, "no rule keeps it"),
        "norm.weight": ("keep", FP32, "norm (LayerNorm)"),
        "lm_head.weight": ("keep", FP32, "keep_fp32 'lm_head'"),
    }
    assert plan.hooks == (
        HookPlan("norm", "upcast inputs", "norm (LayerNorm)"),
        HookPlan("norm", "downcast outputs", "norm (LayerNorm)"),
        HookPlan("lm_head", "upcast inputs", "keep_fp32 'lm_head'"),
        HookPlan("", "torch losses in FP32", "the model's own code"),
        HookPlan("proj", "downcast inputs", "written before an output head, whose output is FP32"),
        HookPlan("", "downcast inputs", "the model, called with the data"),
        HookPlan("", "warn of 16-bit losses", "the model"),
    )
    assert plan.kept == {"norm": "norm (LayerNorm)", "lm_head": "keep_fp32 'lm_head'"}
    assert plan.heads == ("lm_head",) and plan.losses == ()
    words = [" ".join(line.split()) for line in str(plan).splitlines()]
    assert words[0] == "plan of a cast to torch.bfloat16:"
    assert "tensor proj.weight: cast torch.bfloat16 no rule keeps it" in words
    assert "module (model): downcast inputs the model, called with the data" in words


@pytest.mark.parametrize("build", [tiny_models.llama, tiny_models.t5, tiny_models.bert])
def test_a_plan_changes_nothing_and_a_cast_does_what_it_says(build: Any) -> None:
    model, _ = build()
    state, hooks, names = bits(model), hook_counts(model), [sorted(vars(m)) for m in model.modules()]
    plan = make_plan(model)
    assert_same_bits(bits(model), state)
    assert hook_counts(model) == hooks and [sorted(vars(m)) for m in model.modules()] == names
    report = cast_model(model)
    assert {tensor.name: tensor.dtype for tensor in plan.tensors}.items() <= dtypes(model).items()
    assert report.kept == plan.kept and set(report.boundaries) == set(plan.hooks_of("upcast inputs"))
    kinds = [hook.kind for hook in plan.hooks]
    expected = [sum("inputs" in kind for kind in kinds), sum("outputs" in k or "warn" in k for k in kinds)]
    before, after = (list(map(sum, zip(*counts, strict=True))) for counts in (hooks, hook_counts(model)))
    assert [new - old for new, old in zip(after, before, strict=True)] == expected
    assert make_plan(model) == plan


def test_a_report_counts_elements_and_bytes_and_tied_weights_once() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, bias=False))
    model[2].register_buffer("scale", torch.ones(7))
    report = cast_model(model)
    # Linear 3*5 + 5, norm 5 + 5, linear 5*2; buffers: mean and variance 5 + 5, scale 7, a counter.
    assert report.before == {FP32: (40, 17, 4 * 57), torch.int64: (0, 1, 8)}
    assert report.after == {FP32: (10, 10, 4 * 20), BF16: (30, 7, 2 * 37), torch.int64: (0, 1, 8)}
    assert set(report.cast) == {"0.weight", "0.bias", "2.weight", "2.scale"} and report.dtype == BF16
    model, _ = tiny_models.llama(tied=True)
    assert cast_model(model).before[FP32].parameters == sum(parameter.numel() for parameter in model.parameters())


def test_the_text_of_a_report() -> None:
    text = str(cast_model(tiny_models.llama()[0], keep_fp32="lm_head"))
    for line in (
        r"^cast to torch\.bfloat16: 15 tensors converted$",
        r"^  before torch\.float32 +[\d,]+ parameters, 8 buffer elements, [\d,]+ bytes$",
        r"^  after  torch\.bfloat16 ",
        r"^    model\.layers\.\*\.input_layernorm \(x2\): norm \(LlamaRMSNorm\)$",
        r"^    model\.rotary_emb: rotary \(LlamaRotaryEmbedding\)$",
        r"^    lm_head: keep_fp32 'lm_head'$",
        r"^  inputs rounded:\n    \(model\): to torch.bfloat16, except labels and targets",
    ):
        assert re.search(line, text, re.MULTILINE), (line, text)
    assert "upcast" not in text and "warning" not in text and "recomputed" not in text
    text = str(cast_model(tiny_models.bert()[0].to(BF16)))
    assert "LayerNorm.weight: was torch.bfloat16" in text and "position_ids: Tensor of torch.int64" in text


@pytest.mark.parametrize("dtype", [FP32, torch.float64, torch.int8, torch.float8_e4m3fn, "float32", None])
def test_bad_dtype(dtype: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"torch\.bfloat16 or torch\.float16"):
        cast_model(model, dtype)
    assert model.weight.dtype == FP32


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_float16(name: str) -> None:
    model, batch = ARCHITECTURES[name].build()
    exact = model(**batch).loss.item()
    cast_model(model, FP16)
    assert set(dtypes(model).values()) - {torch.int64} == {FP16, FP32}
    seen = output_dtypes(model, batch)
    assert all(seen[path] == {FP16} for path in norm_modules(model))
    loss = model(**batch).loss
    loss.backward()
    # FP16 rounds eight times finer than BF16, whose error here stays below 1 % of the loss.
    assert abs(loss.item() - exact) < 0.01 / 8 * exact


def test_existing_gradients() -> None:
    model, batch = tiny_models.llama(tied=True)
    model(**batch).loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert cast_model(model, "bfloat16").dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == parameter.dtype
        assert torch.equal(parameter.grad, grads[name].to(parameter.dtype))
    model(**batch).loss.backward()
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in model.parameters())


def test_memory_format() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    cast_model(model)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("through", COPIES)
def test_copies(through: str) -> None:
    model, batch = tiny_models.llama(tied=True)
    report = cast_model(model, keep_fp32=nn.Embedding)
    assert copy_of(report, through) == report
    twin = copy_of(model, through)
    assert_same_bits(bits(twin), bits(model))
    assert hook_counts(twin) == hook_counts(model)
    one, two = model(**batch).loss, twin(**batch).loss
    two.backward()
    assert torch.equal(one, two)
    report = cast_model(twin)
    assert report.already_cast and not report.changed


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    model, batch = ARCHITECTURES[name].build()
    cast_model(model, keep_fp32="*.0.*.[ko]*")
    twin = copy.deepcopy(model)
    one = model(**batch).loss
    one.backward()
    twin.gradient_checkpointing_enable({"use_reentrant": reentrant})
    two = twin(**batch).loss
    two.backward()
    assert torch.equal(one, two)
    for (path, left), (_, right) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert right.grad.dtype == right.dtype and right.grad.isfinite().all(), path
        # In T5 checkpointing changes the order in which the decoder layers' BF16 gradients are summed.
        assert name == "t5" or torch.equal(left.grad, right.grad), path


def test_compile() -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), ScaleRMSNorm(4))
    cast_model(model, keep_fp32="2")
    x = torch.randn(3, 4, dtype=BF16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    compiled(x).sum().backward()
    assert gradient_dtypes(model[1]) == {FP32}


def test_compiled_before_the_cast() -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    compiled: Any = torch.compile(model, backend="eager")
    assert cast_model(compiled).inputs == ("_orig_mod",)
    assert compiled(torch.randn(3, 4)).dtype == model(torch.randn(3, 4)).dtype == BF16


@pytest.mark.every_case
def test_compile_language_model() -> None:
    torch.compiler.reset()
    model, batch = tiny_models.llama(num_hidden_layers=1)
    cast_model(model)
    compiled: Any = torch.compile(model, backend="aot_eager")
    loss = compiled(**batch).loss
    loss.backward()
    assert torch.equal(loss, model(**batch).loss)
    assert cast_model(compiled).already_cast


def test_meta_device() -> None:
    with torch.device("meta"):
        model, _ = tiny_models.llama(tied=True)
    identities = [id(parameter) for parameter in model.parameters()]
    report = cast_model(model.to(BF16), keep_fp32="layers.0.mlp")
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert all(parameter.is_meta for parameter in model.parameters())
    reference, _ = tiny_models.llama(tied=True)
    cast_model(reference, keep_fp32="layers.0.mlp")
    assert dtypes(model) == dtypes(reference) and hook_counts(model) == hook_counts(reference)
    assert report.after == cast_model(reference).after and not report.warnings


def test_fused_inference_path_and_recurrent_layers_of_torch() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    exact = copy.deepcopy(model)
    cast_model(model)
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        out = model(x.to(BF16))
        # About 20 roundings of at most 2^-8 each, adding up like a root, of values that reach about 3.
        assert out.dtype == BF16 and (out - exact(x)).abs().max() < 20**0.5 * 2**-8 * 3
    model = nn.LSTM(4, 4)
    cast_model(model)
    out, _ = model(torch.randn(3, 2, 4, dtype=BF16))
    out.sum().backward()
    assert out.dtype == BF16


def test_a_second_cast_changes_nothing() -> None:
    model, batch = tiny_models.llama()
    cast_model(model, keep_fp32="lm_head")
    state, hooks, loss = bits(model), hook_counts(model), model(**batch).loss
    for keep in ((), "lm_head", ["*.norm", "lm_head"]):
        report = cast_model(model, keep_fp32=keep)
        assert report.already_cast and not report.changed and not report.cast and not report.upcast
        assert report.before == report.after
        assert str(report).startswith("already cast to torch.bfloat16: nothing changed")
        assert_same_bits(bits(model), state)
        assert hook_counts(model) == hooks
    assert torch.equal(model(**batch).loss, loss)


def test_what_a_second_cast_cannot_do() -> None:
    model = nn.Sequential(Net())
    cast_model(model[0])
    state = bits(model)
    with pytest.raises(ValueError, match=r"already cast to torch\.bfloat16"):
        cast_model(model, FP16)
    for part, name in ((model, r"0\.lm_head"), (model[0], "lm_head")):
        with pytest.raises(ValueError, match=rf"too late for {name}\.weight"):
            cast_model(part, keep_fp32="lm_head")
    assert_same_bits(bits(model), state)


def test_a_model_that_has_grown() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    cast_model(model, keep_fp32="0")
    model.append(nn.Linear(4, 4)).append(nn.LayerNorm(4)).append(nn.Linear(4, 4))
    report = cast_model(model, keep_fp32="4")
    assert report.already_cast and report.changed
    assert set(report.cast) == {"2.weight", "2.bias"}
    assert {name.split(".")[0] for name in fp32_names(model)} == {"0", "1", "3", "4"}
    assert hook_counts(model)[1:] == [(1, 1), (1, 1), (1, 0), (1, 1), (1, 0)]
    assert model(torch.randn(2, 4)).dtype == FP32


def test_a_model_that_was_converted_after_the_cast() -> None:
    model, batch = tiny_models.llama()
    fresh = bits(model)
    cast_model(model)
    hooks = hook_counts(model)
    report = cast_model(model.to(BF16))
    assert set(report.upcast) == {n for n in fresh if NORM_PATH.search(n.rpartition(".")[0]) or "inv_freq" in n}
    assert report.already_cast and report.changed and hook_counts(model) == hooks
    assert torch.equal(model.model.rotary_emb.inv_freq, fresh["model.rotary_emb.inv_freq"])
    model(**batch).loss.backward()


def test_a_part_that_returned_float32_on_its_own() -> None:
    model, x = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 2)), torch.randn(3, 4)
    cast_model(model[0])
    return_float32(model[0])
    assert model[0](x).dtype == FP32
    cast_model(model)
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model(x).dtype == model[0](x).dtype == BF16
    return_float32(model)
    assert model(x).dtype == FP32 and not cast_model(model).changed
    assert model(x).dtype == FP32, "the whole goes on returning FP32"
    for part in (model[0][0], copy.deepcopy(model[0]), pickle.loads(pickle.dumps(model[0]))):
        assert part(x.to(BF16)).dtype == BF16
        return_float32(part)
        assert part(x.to(BF16)).dtype == FP32
    uncast_model(model)
    with pytest.raises(ValueError, match="Sequential was not cast"):
        return_float32(model[0])


def test_uncast_leaves_hooks_of_others_and_lets_a_model_be_cast_to_another_dtype() -> None:
    model, batch = tiny_models.llama(tied=True)
    norm, seen = model.model.norm, []
    norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    norm.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    before = hook_counts(model)
    cast_model(model)
    model(**batch)
    uncast_model(model)
    assert hook_counts(model) == before
    model(**batch).loss.backward()
    assert seen == [BF16, BF16, FP32, FP32]
    assert not cast_model(model, FP16).already_cast and model.lm_head.weight.dtype == FP16


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_that_is_wrapped_is_refused(process_group: None) -> None:
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    sharded = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=init_device_mesh("cpu", (1,)))
    for target in (wrapped, nn.Sequential(wrapped), sharded, nn.Sequential(sharded)):
        with pytest.raises(ValueError, match=r"already wrapped or sharded .*; call cast_model before that"):
            cast_model(target)


@pytest.mark.parametrize("trainable", [True, False])
def test_dtensors_are_converted_in_place(process_group: None, trainable: bool) -> None:
    """Tensor parallelism shards a model before it is cast; optimizers and FSDP2 hold its parameters."""
    model, plain = nn.Linear(3, 5), nn.Linear(3, 5)
    plain.load_state_dict(model.state_dict())
    mesh = init_device_mesh("cpu", (1,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh), requires_grad=trainable)
    model.weight.grad = distribute_tensor(torch.full((5, 3), 1 / 3), mesh)
    model.weight.note = "kept"
    plain.weight.requires_grad_(trainable)
    weight = model.weight
    for module in (model, plain, model):
        cast_model(module)
    assert model.weight is weight and (weight.note, weight.requires_grad) == ("kept", trainable)
    assert (weight.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(weight.full_tensor(), plain.weight)
    assert (attached_low_bits(weight) is not None) == trainable
    assert not trainable or torch.equal(attached_low_bits(weight), attached_low_bits(plain.weight))


def test_what_transformers_shards_at_load_is_cast_before_it_runs(process_group: None) -> None:
    """FSDP2 notes dtypes in the first forward pass; a cast after it would go unnoticed."""
    model = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=init_device_mesh("cpu", (1,)))
    model.is_distributed_loading_by_transformers = True
    model(torch.ones(1, 2))
    with pytest.raises(ValueError, match="call cast_model before the first forward pass"):
        cast_model(model)


def test_what_an_earlier_transformers_shards_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.tp_size = 2
    with pytest.raises(ValueError, match=r"tp_size=2.*upgrade transformers"):
        cast_model(model)
