"""Code that mixes formats fails with torch's own error, which then names the module, and what to keep in FP32."""

import copy
import pickle
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import conv1d, conv3d, grid_sample, layer_norm, scaled_dot_product_attention

from hf_lowprec.casting import cast_model, uncast_model
from hf_lowprec.casting.hooks.input_downcast import numbers_of
from tests.support.models.inspection import BF16, FP16, hook_counts


class Head(nn.Module):
    """Its own code converts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.float()).relu())


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block(make()) for _ in range(blocks))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Computes(nn.Module):
    """Its own code does one operation with an FP32 tensor and a 16-bit parameter."""

    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(x.to(torch.float32), self.weight)


def sampled(x: Tensor, w: Tensor) -> Tensor:
    return grid_sample(w[None, None], x[None, :, :2, None].expand(1, 3, 2, 2), align_corners=True)[0, 0, :, :1]


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": nn.functional.linear,
    "matmul": lambda x, w: x @ w,
    "mv": lambda x, w: w @ x[0] + x,
    "dot": lambda x, w: x + x[0] @ w[0],
    "bmm": lambda x, w: torch.bmm(x[None], w[None])[0],
    "baddbmm": lambda x, w: torch.baddbmm(x[None], x[None], w[None])[0],
    "addmm": lambda x, w: torch.addmm(w[0], x, w),
    "einsum": lambda x, w: torch.einsum("ab,bc->ac", x, w),
    "conv1d": lambda x, w: conv1d(x.T[None], w[:, :, None])[0].T,
    "conv1d with a bias": lambda x, w: conv1d(x.T[None], w[:, :, None], w[0])[0].T,
    "conv3d": lambda x, w: conv3d(x.T[None, :, :, None, None], w[:, :, None, None, None])[0, :, :, 0, 0].T,
    "layer_norm": lambda x, w: layer_norm(x, (4,), w[0], w[1]) + x,
    "attention": lambda x, w: scaled_dot_product_attention(x[None], w[None], w[None])[0],
    "bilinear": lambda x, w: nn.functional.bilinear(x, x, w[:, :, None].expand(4, 4, 4), w[0]),
    "lerp": lambda x, w: torch.lerp(x[0], w[0], 0.5) + x,
    "cdist": torch.cdist,
    "index_put": lambda x, w: w.clone().index_put((torch.arange(3),), x)[:3],
    "index_add": lambda x, w: w.index_add(0, torch.arange(3), x)[:3],
    "scatter": lambda x, w: w.scatter(0, torch.arange(3)[:, None].expand(3, 4), x)[:3],
    "masked_scatter": lambda x, w: w.masked_scatter(torch.ones(4, 4) > torch.arange(4)[:, None] - 2, x)[:3],
    "grid_sample": lambda x, w: x + sampled(x, w),
}


def advice(error: BaseException) -> str:
    found = re.search(r"keep_fp32='([^']*)'", str(error))
    assert found is not None, str(error)
    return found[1]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_and_the_advice_works(name: str, dtype: torch.dtype) -> None:
    model = Net(lambda: Computes(OPERATIONS[name]))
    fresh = copy.deepcopy(model)
    with pytest.raises(RuntimeError) as plain:
        Computes(OPERATIONS[name]).to(dtype)(X)
    cast_model(model, dtype)
    with pytest.raises(type(plain.value)) as caught:
        model(X)
    assert str(caught.value).startswith(str(plain.value))
    assert "'blocks.0.inner' (Computes)" in str(caught.value)
    assert advice(caught.value) == "blocks.*.inner"
    cast_model(fresh, dtype, keep_fp32=advice(caught.value))
    fresh(X).sum().backward()
    assert all(p.grad is not None for p in fresh.parameters())


class TestNames:
    def test_code_that_converts_for_others(self) -> None:
        model = Net(Head)
        fresh = copy.deepcopy(model)
        cast_model(model)
        with pytest.raises(RuntimeError, match="mat1 and mat2 must have the same dtype") as caught:
            model(X)
        text = str(caught.value)
        assert "this failed in 'blocks.0.inner.first' (Linear), called by 'blocks.0.inner' (Head)" in text
        assert "optim_args=\"keep_fp32=blocks.*.inner\"" in text  # fmt: skip
        cast_model(fresh, keep_fp32=advice(caught.value))
        fresh(X).sum().backward()
        assert all(p.grad is not None for p in fresh.parameters())

    def test_of_recurrent_layers(self) -> None:
        class Recurrent(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.rnn = nn.GRU(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                return self.rnn(x.double().float())[0]

        model = Net(Recurrent)
        cast_model(model)
        with pytest.raises(ValueError, match=r"RNN input dtype|must have the type") as caught:
            model(X)
        assert advice(caught.value) == "blocks.*.inner"

    def test_one_of_several_layers(self) -> None:
        """Of the others only the name's digits differ: they are of another class."""
        model = Net(nn.Identity)
        model.blocks[1].inner = Head()
        model.blocks[0].inner = nn.Linear(4, 4)
        cast_model(model)
        with pytest.raises(RuntimeError) as caught:
            model(X)
        assert advice(caught.value) == "blocks.1.inner"

    def test_the_model_itself(self) -> None:
        class Root(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Linear(4, 4)
                self.head = nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.body(x).float())

        model = Root()
        fresh = copy.deepcopy(model)
        cast_model(model)
        with pytest.raises(RuntimeError, match=r"called by the model \(Root\)") as caught:
            model(X)
        assert advice(caught.value) == "head"
        cast_model(fresh, keep_fp32="head")
        fresh(X).sum().backward()
        alone = Computes(OPERATIONS["matmul"])
        cast_model(alone)
        with pytest.raises(RuntimeError, match=r"this failed in the model \(Computes\)\. Convert in its code"):
            alone(X)

    def test_a_tensor_of_the_model_itself(self) -> None:
        class Root(nn.Module):
            def __init__(this) -> None:
                super().__init__()
                this.body = nn.Linear(4, 4)
                this.matrix = nn.Parameter(torch.eye(4))
                this.register_buffer("shift", torch.ones(4))

            def forward(this, x: Tensor) -> Tensor:
                h = this.body(x) + this.shift
                return torch.addmm(
                    this.shift,
                    h.float(),
                    this.matrix,
                ) if x.sum() > 100 else h.float() @ this.matrix  # fmt: skip

        model, fresh = Root(), Root()
        cast_model(model)
        cases: list[tuple[Tensor, str | list[str], str]] = [(X, "matrix", "matrix")]
        if sys.version_info >= (3, 11):  # before, a traceback does not say on which line an expression ends
            cases += [(X + 1000, ["shift", "matrix"], "shift|matrix")]
        for x, entries, option in cases:
            with pytest.raises(
                RuntimeError, match=r"this failed in the model \(Root\)\. Convert in its code"
            ) as caught:
                model(x)
            assert f"keep_fp32={entries!r})" in str(caught.value)
            assert f'optim_args="keep_fp32={option}"' in str(caught.value)
            kept = copy.deepcopy(fresh)
            cast_model(kept, keep_fp32=entries)
            kept(x).sum().backward()
            assert kept.matrix.grad is not None

    def test_no_tensor_of_the_model_itself(self) -> None:
        """There is nothing that can be kept in FP32 to help."""

        class Root(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                return self.first(x).float() @ self.second(x).T

        model = Root()
        cast_model(model)
        with pytest.raises(RuntimeError, match=r"Convert in its code \(`a\.to\(b\.dtype\)`\)\.$") as caught:
            model(X)
        assert "keep_fp32" not in str(caught.value)

    def test_what_bf16_cannot(self) -> None:
        model = Net(lambda: Computes(lambda x, w: x + torch.cdist(w, w)[:3]))
        cast_model(model)
        with pytest.raises(NotImplementedError, match="not implemented for 'BFloat16'") as caught:
            model(X)
        assert advice(caught.value) == "blocks.*.inner"

    def test_a_part_that_was_cast_first(self) -> None:
        model = Net(Head)
        cast_model(model.blocks[0])
        cast_model(model)
        with pytest.raises(RuntimeError) as caught:
            model(X)
        assert str(caught.value).count("hf_lowprec") == 1 and "'blocks.0.inner.first'" in str(caught.value)


class Projects(nn.Module):
    """Multiplies numbers with its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, points: Tensor, scale: Tensor | None = None) -> Tensor:
        if scale is not None:
            h = self.linear(points) * scale[:, None]
            return torch.baddbmm(self.weight[None].expand(3, 4, 4), h[:, :, None], h[:, None, :])
        return self.linear(points @ self.weight)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Projects()

    def forward(self, points: Tensor) -> Tensor:
        return self.inner(points)


class TestNumbers:
    """They come in as FP32, so the error names them, and to pass them in 16 bits helps."""

    def test_are_named(self) -> None:
        model = Projects()
        cast_model(model)
        with pytest.raises(RuntimeError, match=r"were passed as `points` and not rounded\. Pass activations in 16"):
            model(X)
        model(X.to(BF16)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    def test_in_a_product_of_batches(self) -> None:
        model = Projects()
        cast_model(model)
        with pytest.raises(RuntimeError, match="FP32 numbers were passed as `scale`"):
            model(X.to(BF16), torch.rand(3))
        model(X.to(BF16), torch.rand(3).to(BF16)).sum().backward()

    def test_of_the_module_that_failed(self) -> None:
        model = Outer()
        cast_model(model)
        with pytest.raises(RuntimeError, match=r"keep_fp32='inner'.*FP32 numbers were passed as `points`"):
            model(X)

    def test_that_did_not_come_in_are_not_named(self) -> None:
        model = Net(Head)
        cast_model(model)
        with pytest.raises(RuntimeError) as caught:
            model(X)
        assert "FP32 numbers were passed as" not in str(caught.value)

    def test_are_forgotten_with_the_cast(self) -> None:
        model = Projects()
        cast_model(model)
        with pytest.raises(RuntimeError, match="`points`"):
            model(X)
        uncast_model(model)
        assert not numbers_of(model) and not any("_low_precision" in key for key in vars(model))


class TestOtherErrors:
    @pytest.mark.parametrize(
        "fails",
        [
            lambda x, w: x @ w[:2],
            nn.functional.embedding,
            lambda x, w: x.index_add(0, torch.arange(3), torch.ones(3, 4).long()),
            lambda x, w: (_ for _ in ()).throw(RuntimeError("expected scalar type Long but found Float")),
            lambda x, w: (_ for _ in ()).throw(ValueError("labels have the same length")),
            lambda x, w: (_ for _ in ()).throw(KeyError("same dtype")),
            lambda x, w: (_ for _ in ()).throw(RuntimeError()),
        ],
    )
    def test_stay_as_they_are(self, fails: Callable[[Tensor, Tensor], Tensor]) -> None:
        model = Computes(fails)
        cast_model(model, keep_fp32="weight")
        cast_model(net := nn.Sequential(nn.Linear(4, 4), model))
        with pytest.raises(Exception) as plain:
            model.forward(X)
        with pytest.raises(type(plain.value)) as caught:
            net(X)
        assert caught.value.args == plain.value.args

    def test_a_call_that_handles_another_error(self) -> None:
        """The model is called, and returns nothing, while somebody else's error is handled."""

        class Nothing(nn.Linear):
            def forward(self, x: Tensor) -> None:  # type: ignore[override]
                return None

        model = Nothing(4, 4)
        cast_model(model)
        with pytest.raises(RuntimeError) as caught:
            try:
                raise RuntimeError("mat1 and mat2 must have the same dtype")
            except RuntimeError:
                model(X)
                raise
        assert "hf_lowprec" not in str(caught.value)


class TestComposition:
    def test_copies(self) -> None:
        model = Net(Head)
        cast_model(model)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with pytest.raises(RuntimeError, match=r"keep_fp32='blocks\.\*\.inner'"):
                twin(X)

    def test_twice_and_taken_back(self) -> None:
        model = Net(Head)
        before = hook_counts(model)
        cast_model(model)
        hooks = hook_counts(model)
        assert not cast_model(model).changed and hook_counts(model) == hooks
        assert hooks[0] == (1, 2) and not any(forward for _, forward in hooks[1:3])
        uncast_model(model)
        assert hook_counts(model) == before and not model._forward_hooks_always_called
        model(X).sum().backward()

    def test_compiled_models_train(self) -> None:
        torch.compiler.reset()
        model = Net(lambda: nn.Linear(4, 4))
        cast_model(model)
        compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(X), model(X))


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.float, nn.Module.double, nn.Module.bfloat16])
def test_a_model_that_was_converted_after_its_cast(convert: Callable[[nn.Module], Any]) -> None:
    """Nothing is to be kept in FP32 then: one line is too many."""
    model = Net(lambda: nn.Linear(4, 4))
    cast_model(model)
    convert(model)
    now = str(model.embed.weight.dtype).removeprefix("torch.")
    with pytest.raises(
        RuntimeError, match=rf"converted to {now} after cast_model had converted it to bfloat16"
    ) as caught:
        model(X)
    assert "Remove that line" in str(caught.value) and "hf_lowprec.save_pretrained" in str(caught.value)
    assert "keep_fp32" not in str(caught.value)


def test_one_module_that_was_converted_after_the_cast_is_to_be_kept_by_it() -> None:
    model = Net(lambda: nn.Linear(4, 4))
    cast_model(model)
    model.head.float()
    with pytest.raises(RuntimeError, match=r"keep_fp32='head'") as caught:
        model(X)
    assert "after cast_model" not in str(caught.value)


def test_a_cast_model_that_fsdp2_shards_without_its_norms(two_fake_ranks: None) -> None:
    model = Net(lambda: nn.Linear(4, 4))
    cast_model(model)
    fully_shard(model)
    with pytest.raises(AssertionError, match=r"FSDP expects uniform .*dtype[\s\S]*prepare_accelerator\(accelerator\)"):
        model(X)
