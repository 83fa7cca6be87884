"""What stays in FP32, by a module's kind, the model's class or `keep_fp32`, and how it works with the rest."""

import copy
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers.core_model_loading import build_glob_alternation

from hf_lowprec.casting import cast_model, uncast_model
from tests.support.models import norm_layers, tiny_models
from tests.support.models.inspection import (
    BF16,
    FP32,
    assert_same_bits,
    bits,
    dtypes,
    fp32_names,
    hook_counts,
    output_dtypes,
)

UNIT = 2.0**-8  # rounding to BF16 errs by at most this much of the value


class Frequencies(nn.Module):
    """Sines of positions, which go by an FP32 table and come in the dtype of the states."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(4) / 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1])[:, None] * self.inv_freq
        return torch.cat((angles.sin(), angles.cos()), -1).to(x.dtype).expand(x.shape)


class GaussianFourierProjection(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).sin()


class MatrixFunction(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.matrix_exp(self.weight).T


class HieraPatchEmbeddings(nn.Module):
    """A listed class, whose child gets FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x * torch.ones(x.shape))


class CalledInTheDtypeOfANorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).to(next(iter(self.blocks.parameters())).dtype)
        for block in self.blocks:
            x = x.float() + block(x)
        return x.to(self.first.weight.dtype)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.proj = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) * self.scale.to(x.dtype)


class Index(nn.Module):
    """An index and a scale, neither of which is a quantizer's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("index", torch.arange(8, dtype=torch.int32))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.index.long()] * self.scale


class Router(nn.Linear):
    """Uses `topk`, and so chooses experts."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.topk(super().forward(x).float() + self.bias_of_load, 8).values.to(x.dtype)

    def __init__(self, name: str, make: Any) -> None:
        super().__init__(8, 8, bias=False)
        self.register_buffer("bias_of_load", torch.zeros(8))
        setattr(self, name, make(torch.full((8,), 1.001)))


def between(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The module, between two linear layers."""
    return lambda: nn.Sequential(nn.Linear(8, 8), make(), nn.Linear(8, 8))


def with_child(layer: nn.Module) -> nn.Module:
    layer.add_module("child", nn.Dropout(0.0))
    return layer


def tied_in_a_chain() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model[0].weight, model[1].bias = model[1].weight, model[2].bias
    return model


def shared_module() -> nn.Module:
    shared = nn.Linear(8, 8)
    return nn.Sequential(OrderedDict(first=shared, middle=nn.Linear(8, 8), second=shared))


def shared_buffer() -> nn.Module:
    model = nn.Sequential(Index(), Index())
    model[0].scale = model[1].scale
    return model


def buffers() -> nn.Module:
    model = nn.Linear(8, 8)
    model.register_buffer("transient", torch.randn(3), persistent=False)
    model.register_buffer("wide", torch.randn(3, dtype=torch.float64))
    for k, dtype in enumerate((torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn)):
        model.register_buffer(f"other_{k}", torch.ones(3).to(dtype))
    return model


orthogonal = parametrizations.orthogonal
NORMS: dict[str, Callable[[], nn.Module]] = {
    **{cls.__name__: partial(cls, 8) for cls in (nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d, nn.SyncBatchNorm)},
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
    "BatchNorm without weights": lambda: nn.BatchNorm1d(8, affine=False),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(8, affine=True),
    **{name: partial(getattr(norm_layers, name), 8) for name in norm_layers.NORMS},
}
FUNCTIONS: dict[str, Callable[[], nn.Module]] = {
    "matrix_exp": lambda: orthogonal(nn.Linear(8, 8), orthogonal_map="matrix_exp"),
    "cayley": lambda: orthogonal(nn.Linear(8, 8), orthogonal_map="cayley"),
    "householder": lambda: orthogonal(nn.Linear(8, 8), orthogonal_map="householder"),
    "code": lambda: MatrixFunction(8, 8, bias=False),
}
FROZEN = partial(nn.Parameter, requires_grad=False)
BIASES = [
    *(("load_bias", nn.Buffer, True), ("load_bias", nn.Parameter, False), ("bias", FROZEN, False)),
    ("e_score_correction_bias", nn.Parameter, True),  # so it is in DeepSeek's own code
    ("expert_bias", nn.Parameter, False),  # which experts add to their results
    ("expert_bias", FROZEN, True),
]
CASES: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, str]]] = {
    **{name: (between(make), (), {"1": "norm ("}) for name, make in NORMS.items()},
    "norm first": (lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), (), {"0": "norm (LayerNorm)"}),
    "norm last": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), (), {"1": "norm (LayerNorm)"}),
    "norms of an encoder": (lambda: norm_layers.EncoderStableLayerNorm(8), (), {"layer_norm": "norm (LayerNorm)"}),
    "norm in name only": (lambda: norm_layers.PreLayerNormModel(8, 8), (), {}),
    "norm without tensors": (between(lambda: nn.LayerNorm(8, elementwise_affine=False)), (), {}),
    "frequencies": (between(Frequencies), (), {"1": "rotary (Frequencies)"}),
    "Fourier features": (between(lambda: GaussianFourierProjection(8, 8, bias=False)), (), {"1": "Fourier features"}),
    **{name: (between(make), (), {"1": "computes "}) for name, make in FUNCTIONS.items()},
    "matrix function of a layer with children": (
        between(lambda: orthogonal(with_child(nn.Linear(8, 8)))),
        (),
        {"1.parametrizations.weight.0": "computes "},
    ),
    "weight norm": (between(lambda: parametrizations.weight_norm(nn.Conv1d(8, 8, 3, padding=1))), (), {}),
    "spectral norm": (  # whose power iteration is a norm
        between(lambda: parametrizations.spectral_norm(nn.Linear(8, 8))),
        (),
        {"1.parametrizations.weight.0": "norm (_SpectralNorm)"},
    ),
    "listed class": (between(HieraPatchEmbeddings), (), {}),
    "called with the dtype of a norm": (CalledInTheDtypeOfANorm, (), {"blocks.0.0": "norm (LayerNorm)"}),
    **{
        f"{name} of {getattr(make, '__name__', 'frozen')}": (
            partial(Router, name, make),
            (),
            {"bias_of_load": "bias that chooses experts"} | ({name: "bias that chooses experts"} if kept else {}),
        )
        for name, make, kept in BIASES
    },
    "buffers": (buffers, (), {}),
    "an index is not quantized": (between(Index), (), {}),
    "frozen": (lambda: nn.Linear(8, 8).requires_grad_(False), (), {}),
    "tied in a chain": (tied_in_a_chain, "2", {"2": "keep_fp32 '2'", "1": "tied to 2.bias", "0": "tied to 1.weight"}),
    "shared module": (shared_module, "second", {"first": "tied to second", "second": "keep_fp32 'second'"}),
    "shared buffer": (shared_buffer, (), {}),
    "whole components": (lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(11))), "1", {"1": "keep_fp32 '1'"}),
    "tensor of a parent": (between(Gated), "1.scale", {"1.scale": "keep_fp32 '1.scale'"}),
    "tensor of a leaf": (between(Gated), "proj.bias", {"1.proj": "keep_fp32 'proj.bias'"}),
    "everything": (between(nn.Tanh), "*", {"0": "keep_fp32 '*'", "2": "keep_fp32 '*'"}),
    "inside a listed class": (between(HieraPatchEmbeddings), "1", {"1": "keep_fp32 '1'"}),
}


@pytest.mark.parametrize("name", CASES)
def test_kinds_of_modules(name: str) -> None:
    """What is kept has its bits, all else is rounded once; outputs and gradients are those of FP32 but for that."""
    torch.manual_seed(0)
    make, keep, kept = CASES[name]
    model = make().eval()
    exact, before, parameters = copy.deepcopy(model), bits(model), list(model.parameters())
    report = cast_model(model, keep_fp32=keep)
    assert report.kept.keys() == kept.keys() and all(report.kept[key].startswith(why) for key, why in kept.items())
    for path, value in bits(model).items():
        is_kept = any(f"{path}.".startswith(f"{key}.") for key in kept)
        is_cast = before[path].dtype in (FP32, torch.float64) and not is_kept
        expected = before[path].to(BF16) if is_cast else before[path]
        assert value.dtype == expected.dtype and torch.equal(
            *(v.flatten().view(torch.uint8) for v in (value, expected))
        )
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))

    x = torch.randn(2, 8, 8)
    if "SyncBatchNorm" not in name:  # needs a GPU
        y, expected = model(x), exact(x)
        # The longest path rounds some ten values, whose errors add up like a root.
        assert y.dtype == (FP32 if report.heads else BF16)
        assert (y - expected).abs().max() <= 4 * UNIT * expected.abs().max()
        if expected.requires_grad:
            weights = torch.randn_like(expected)
            (y.float() * weights).sum().backward()
            (expected * weights).sum().backward()
        for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                assert (
                    ours.grad.dtype == ours.dtype and (ours.grad - theirs.grad).norm() <= 8 * UNIT * theirs.grad.norm()
                )
    state, hooks = bits(model), hook_counts(model)
    assert not cast_model(model).changed and hook_counts(model) == hooks
    assert_same_bits(bits(model), state)
    uncast_model(model)
    assert (
        hook_counts(model) == hook_counts(exact) and FP32 in {*dtypes(model).values()} and "forward" not in vars(model)
    )
    assert BF16 not in dtypes(model).values()


def test_a_norm_rounds_what_it_computes_in_fp32() -> None:
    norm, x = norm_layers.ScaleRMSNormGated(4), torch.randn(5, 4, requires_grad=True)
    expected = copy.deepcopy(norm)(x, x).to(BF16)
    cast_model(norm)
    assert torch.equal(norm(x, gate=x), expected)
    norm(x=x, gate=x).sum().backward()
    assert x.grad is not None and x.grad.dtype == norm.weight.grad.dtype == FP32


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("lm_head", r"lm_head\."),
        (("lm_head", "embed_tokens"), r"lm_head\.|model\.embed_tokens\."),
        ("model.layers.0.self_attn.q_proj", r"model\.layers\.0\.self_attn\.q_proj\."),
        ("layers.0.*", r"model\.layers\.0\."),
        ("layers", r"model\.layers\."),
        ("*.mlp.down_proj", r".*\.mlp\.down_proj\."),
        ("mlp.down_proj", r".*\.mlp\.down_proj\."),
        ("[qk]_proj", r".*\.[qk]_proj\."),
        ("layers.1.mlp.up_proj.weight", r"model\.layers\.1\.mlp\.up_proj\."),
        ([nn.Embedding], r"model\.embed_tokens\."),
        (nn.Linear, r".*(_proj|lm_head)\."),
    ],
    ids=str,
)
def test_keeps_exactly_these(keep: Any, expected: str) -> None:
    plain, (model, batch) = tiny_models.llama()[0], tiny_models.llama()
    names = {name for name in dtypes(model) if re.match(expected, name)}
    cast_model(plain)
    report = cast_model(model, keep_fp32=keep)
    assert names and fp32_names(model) == names | fp32_names(plain)
    seen = output_dtypes(model, batch)
    assert all(seen[name] == {BF16} for name in {*report.boundaries} - {*report.heads})
    assert model(**batch).logits.dtype == (FP32 if "lm_head.weight" in names else BF16)
    model(**batch).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert "keep_fp32" in str(report)


def test_a_kept_container_has_its_hooks_on_top_and_one_that_is_not_called_on_its_items() -> None:
    for keep in ("layers.1", "layers"):
        model, batch = tiny_models.llama()
        boundaries = {*cast_model(model, keep_fp32=keep).boundaries}
        assert {n for n in boundaries if n.startswith("model.layers.1")} == {"model.layers.1"}
        assert "model.layers" not in boundaries and ("model.layers.0" in boundaries) == (keep == "layers")
        seen = output_dtypes(model, batch)
        assert seen["model.layers.1"] == {BF16} and seen["model.layers.1.mlp"] == {FP32}


@pytest.mark.parametrize("keep", ["lm_head", "embed_tokens"])
def test_every_owner_of_a_tied_weight_is_kept(keep: str) -> None:
    model, batch = tiny_models.llama(tied=True)
    report = cast_model(model, keep_fp32=keep)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.dtype == FP32
    assert {"lm_head", "model.embed_tokens"} <= report.kept.keys() & set(report.boundaries)
    seen = output_dtypes(model, batch)
    assert seen["lm_head"] == {FP32} and seen["model.embed_tokens"] == {BF16}
    model(**batch).loss.backward()
    assert model.lm_head.weight.grad.dtype == FP32


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        ("lm_haed", ["'lm_haed'", "lm_head"]),
        ("LM_HEAD", ["'LM_HEAD'"]),
        ("layers.7.*", ["'layers.7.*'", "layers"]),
        ("head", ["'head'", "lm_head"]),
        ("", ["''"]),
        (["lm_head", "q_porj"], ["'q_porj'", "q_proj"]),
        (nn.Conv2d, ["'Conv2d'"]),
    ],
    ids=str,
)
def test_no_match(keep: Any, words: list[str]) -> None:
    model, _ = tiny_models.llama()
    state, hooks = bits(model), hook_counts(model)
    with pytest.raises(ValueError, match="matches no module or tensor") as error:
        cast_model(model, keep_fp32=keep)
    assert all(word in str(error.value) for word in words), error.value
    assert_same_bits(bits(model), state)
    assert hook_counts(model) == hooks


@pytest.mark.parametrize("keep", [[3], [None], [torch.Tensor], [nn.Linear(1, 1)], int])
def test_wrong_type(keep: Any) -> None:
    with pytest.raises(TypeError, match=r"names \(str\) and torch.nn.Module classes"):
        cast_model(nn.Linear(1, 1), keep_fp32=keep)


@pytest.mark.parametrize("build", [tiny_models.t5, tiny_models.llama, tiny_models.gemma3])
@pytest.mark.parametrize("attribute", ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"])
@pytest.mark.parametrize(
    "names", [["wo"], ["q", "o_proj"], ["attn*v_proj", "Attention*v"], ["mlp.gate_proj.weight", "up"]]
)
def test_names_match_as_in_transformers(build: Any, attribute: str, names: list[str]) -> None:
    model, _ = build()
    model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict = set(), set()
    plain = copy.deepcopy(model)
    cast_model(plain)
    setattr(model, attribute, set(names))
    pattern, _, _ = build_glob_alternation(names)
    expected = {key for key in model.state_dict() if pattern.search(key)}
    cast_model(model)
    assert fp32_names(model) == expected | fp32_names(plain)


def test_a_tensor_that_a_class_names_alone_is_left_to_its_code() -> None:
    class Block(nn.Module):
        _keep_in_fp32_modules_strict = ("gate.weight", "sinks")
        _keep_in_fp32_modules = AttributeError()

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.sinks = nn.Linear(4, 2), nn.Linear(4, 4), nn.Parameter(torch.zeros(2))

    model = nn.ModuleDict({"block": Block(), "gate": nn.Linear(4, 4)})
    assert not cast_model(model).boundaries
    assert fp32_names(model) == {"block.gate.weight", "block.sinks"}
