"""`cast_model`: what ends up in which dtype, and that training on the result works."""

import ast
import copy
import io
import pickle
import re
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.core_model_loading import build_glob_alternation
from transformers.modeling_outputs import BaseModelOutput

from hf_lowprec import casting
from hf_lowprec.casting import cast_model
from tests import tiny_models
from tests.tiny_models import ARCHITECTURES, CLASSES, LAYERS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Found by the names of attributes, where the code under test goes by class.
NORM_PATH = re.compile(r"(^|\.)(\w*norm\w*|ln_\w+)$", re.IGNORECASE)
NORMS_PER_MODEL = {
    "llama": 5,
    "mistral": 5,
    "qwen2": 5,
    "qwen3": 9,
    "gemma2": 9,
    "gemma3": 13,
    "phi3": 5,
    "gpt2": 5,
    "gpt_neox": 5,
    "opt": 5,
    "bert": 5,
    "roberta": 5,
    "t5": 12,
    "vit": 5,
}
VARIANTS = [
    pytest.param(name, tied, attention, id=f"{name}-{'tied' if tied else 'untied'}-{attention}")
    for name, architecture in ARCHITECTURES.items()
    for tied, attention in architecture.variants()
]


def norm_modules(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if NORM_PATH.search(name)}


def tie_pattern(model: nn.Module) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return sorted(groups.values())


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.dtype for name, tensor in tensors}


def fp32_names(model: nn.Module) -> set[str]:
    return {name for name, dtype in dtypes(model).items() if dtype == FP32}


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert torch.equal(value, right[name]), name


def gradient_dtypes(module: nn.Module) -> set[torch.dtype | None]:
    return {None if p.grad is None else p.grad.dtype for p in module.parameters()}


def hook_counts(model: nn.Module) -> list[tuple[int, int]]:
    return [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]


def output_dtypes(model: nn.Module, batch: dict[str, Any]) -> dict[str, set[torch.dtype]]:
    """Dtypes of the floating tensors that each module returned during one forward pass."""
    seen: dict[str, set[torch.dtype]] = {}

    def flatten(value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value] if value.is_floating_point() else []
        values = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else []
        return [tensor for item in values for tensor in flatten(item)]

    handles = [
        module.register_forward_hook(
            lambda m, a, out, name=name: seen.setdefault(name, set()).update(t.dtype for t in flatten(out))
        )
        for name, module in model.named_modules()
    ]
    model(**batch)
    for handle in handles:
        handle.remove()
    return seen


class TestArchitectures:
    @pytest.mark.parametrize(("name", "tied", "attention"), VARIANTS)
    def test_trains(self, name: str, tied: bool, attention: str) -> None:
        model, batch = ARCHITECTURES[name].build(seed=3, tied=tied, attention=attention)
        assert model.config._attn_implementation == attention
        reference = copy.deepcopy(model)
        exact = reference(**batch)
        exact.loss.backward()
        identities = [id(parameter) for parameter in model.parameters()]
        ties = tie_pattern(model)
        # T5 shares its input embedding between encoder and decoder whether or not the head is tied to it.
        assert any(len(group) > 1 for group in ties) == (tied or name == "t5")

        report = cast_model(model)
        assert [id(parameter) for parameter in model.parameters()] == identities
        assert tie_pattern(model) == ties
        assert not report.warnings and report.changed and not report.already_cast

        norms = norm_modules(model)
        assert len(norms) == NORMS_PER_MODEL[name]
        held = {f"{path}.{leaf}" for path, module in norms.items() for leaf, _ in module.named_parameters()}
        held |= {path for path, _ in model.named_buffers() if "inv_freq" in path}
        held |= {path for path, _ in model.named_parameters() if name == "t5" and path.endswith(".wo.weight")}
        original, now = bits(reference), bits(model)
        for path, value in now.items():
            if not value.is_floating_point():
                assert torch.equal(value, original[path])
            elif path in held:
                assert value.dtype == FP32 and torch.equal(value, original[path]), path
            else:
                assert torch.equal(value, original[path].to(BF16)) and value.dtype == BF16, path

        seen = output_dtypes(model, batch)
        assert all(seen[path] == {BF16} for path in norms)
        leaking = {
            path: kinds
            for path, kinds in seen.items()
            if kinds - {BF16} and path and next(model.get_submodule(path).parameters(), None) is not None
        }
        assert not leaking

        outputs = model(**batch)
        assert outputs.logits.dtype == BF16
        # BF16 has 8 significant bits: a rounding to nearest errs by at most u = 2^-8 of the value. On its way
        # to a logit a value is rounded about ten times in each attention (norm, q, k, v, rotation, scores,
        # weights, context, projection, residual sum), five times in each feed-forward (norm, up, activation,
        # down, sum) and three times outside the layers (embedding, last norm, head). Independent errors add
        # up like a root, to sqrt(15 L + 3) u of the largest logit, and cross entropy moves by at most twice
        # the largest error of a logit. In T5 an encoder layer rounds 15 times and a decoder layer, with two
        # attentions, 25. A loss computed in BF16 rounds log-probability, mean and result once: 3 u more.
        unit = 2.0**-8
        roundings = (40 if name == "t5" else 15) * LAYERS + 3
        tolerance = 2 * roundings**0.5 * unit * exact.logits.detach().abs().max().item()
        tolerance += 3 * unit * exact.loss.item() if outputs.loss.dtype == BF16 else 0.0
        assert abs(outputs.loss.item() - exact.loss.item()) <= tolerance

        outputs.loss.backward()
        for (path, parameter), (_, twin) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            assert (parameter.grad is None) == (twin.grad is None), path
            if parameter.grad is not None:
                assert parameter.grad.dtype == parameter.dtype, path
                assert parameter.grad.isfinite().all(), path
        # Both of torch's CPU paths, which differ in how they meet a mix of dtypes, without doubling the runs.
        torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=attention == "sdpa").step()
        assert model(**batch).loss.isfinite()

    @pytest.mark.parametrize("name", ARCHITECTURES)
    def test_builders_are_deterministic(self, name: str) -> None:
        architecture = ARCHITECTURES[name]
        attention = architecture.attentions[0]
        (one, batch), (two, again) = (architecture.build(seed=5, attention=attention) for _ in range(2))
        other, _ = architecture.build(seed=6, attention=attention)
        assert_same_bits(bits(one), bits(two))
        assert_same_bits(batch, again)
        assert any(not torch.equal(value, bits(other)[key]) for key, value in bits(one).items())


class TestTwice:
    def test_changes_nothing(self) -> None:
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

    def test_other_dtype(self) -> None:
        model, _ = tiny_models.llama()
        cast_model(model.model)
        state = bits(model)
        with pytest.raises(ValueError, match=r"already cast to torch\.bfloat16"):
            cast_model(model, FP16)
        assert_same_bits(bits(model), state)

    def test_keeping_what_was_rounded(self) -> None:
        model, _ = tiny_models.llama()
        cast_model(model)
        with pytest.raises(ValueError, match=r"too late for lm_head\.weight"):
            cast_model(model, keep_fp32="lm_head")

    def test_grown_model(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        cast_model(model, keep_fp32="0")
        model.append(nn.Linear(4, 4)).append(nn.LayerNorm(4)).append(nn.Linear(4, 4))
        report = cast_model(model, keep_fp32="4")
        assert report.already_cast and report.changed
        assert set(report.cast) == {"2.weight", "2.bias"}
        assert {name.split(".")[0] for name in fp32_names(model)} == {"0", "1", "3", "4"}
        assert hook_counts(model)[1:] == [(1, 1), (1, 1), (0, 0), (1, 1), (1, 1)]
        assert model(torch.randn(2, 4)).dtype == BF16

    def test_after_a_stray_to(self) -> None:
        model, batch = tiny_models.llama()
        fresh = bits(model)
        cast_model(model)
        hooks = hook_counts(model)
        report = cast_model(model.to(BF16))
        assert set(report.upcast) == {n for n in fresh if NORM_PATH.search(n.rpartition(".")[0]) or "inv_freq" in n}
        assert report.already_cast and report.changed and hook_counts(model) == hooks
        assert torch.equal(model.model.rotary_emb.inv_freq, fresh["model.rotary_emb.inv_freq"])
        model(**batch).loss.backward()


class TestKeepPatterns:
    @pytest.mark.parametrize(
        ("keep", "expected"),
        [
            ("lm_head", r"lm_head\."),
            (["lm_head"], r"lm_head\."),
            (("lm_head", "embed_tokens"), r"lm_head\.|model\.embed_tokens\."),
            ("model.layers.0.self_attn.q_proj", r"model\.layers\.0\.self_attn\.q_proj\."),
            ("layers.0.*", r"model\.layers\.0\."),
            ("layers.0", r"model\.layers\.0\."),
            ("layers", r"model\.layers\."),
            ("*.mlp.down_proj", r".*\.mlp\.down_proj\."),
            ("mlp.down_proj", r".*\.mlp\.down_proj\."),
            ("[qk]_proj", r".*\.[qk]_proj\."),
            ("layers.1.mlp.up_proj.weight", r"model\.layers\.1\.mlp\.up_proj\."),
            ("model", r"model\."),
            (nn.Embedding, r"model\.embed_tokens\."),
            ([nn.Linear], r".*(_proj|lm_head)\."),
            ("*", r""),
        ],
        ids=str,
    )
    def test_keeps_exactly_these(self, keep: Any, expected: str) -> None:
        model, batch = tiny_models.llama()
        original = bits(model)
        names = {name for name in dtypes(model) if re.match(expected, name)}
        assert names
        cast_model(model)
        always = fp32_names(model)

        model, batch = tiny_models.llama()
        report = cast_model(model, keep_fp32=keep)
        assert fp32_names(model) == names | always
        assert all(torch.equal(bits(model)[name], original[name]) for name in names)
        outputs = model(**batch)
        assert outputs.logits.dtype == BF16
        outputs.loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        assert "keep_fp32" in str(report)

    def test_components_match_whole(self) -> None:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(11)))
        cast_model(model, keep_fp32="1")
        assert fp32_names(model) == {"1.weight", "1.bias"}

    def test_leaf_follows_its_tensor_but_a_parent_does_not(self) -> None:
        class Gated(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(4))
                self.proj = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.proj(x) * self.scale.to(x.dtype)

        model = nn.Sequential(Gated(), Gated())
        report = cast_model(model, keep_fp32=["0.scale", "1.proj.bias"])
        assert fp32_names(model) == {"0.scale", "1.proj.weight", "1.proj.bias"}
        assert set(report.boundaries) == {"1.proj"}
        assert model(torch.randn(2, 4, dtype=BF16)).dtype == BF16

    def test_container_has_its_boundary_on_top(self) -> None:
        model, batch = tiny_models.llama()
        report = cast_model(model, keep_fp32="layers.1")
        inside = [name for name in dict(model.named_modules()) if name.startswith("model.layers.1.")]
        assert "model.layers.1" in report.boundaries and not set(inside) & set(report.boundaries)
        seen = output_dtypes(model, batch)
        assert seen["model.layers.1"] == {BF16}
        assert seen["model.layers.1.input_layernorm"] == seen["model.layers.1.mlp"] == {FP32}
        assert seen["model.layers.0.input_layernorm"] == {BF16}

    def test_list_of_modules_has_boundaries_on_its_items(self) -> None:
        report = cast_model(tiny_models.llama()[0], keep_fp32="layers")
        assert {"model.layers.0", "model.layers.1"} <= set(report.boundaries)
        assert "model.layers" not in report.boundaries

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
    def test_no_match(self, keep: Any, words: list[str]) -> None:
        model, _ = tiny_models.llama()
        state, hooks = bits(model), hook_counts(model)
        with pytest.raises(ValueError, match="matches no module or tensor") as error:
            cast_model(model, keep_fp32=keep)
        assert all(word in str(error.value) for word in words), error.value
        assert_same_bits(bits(model), state)
        assert hook_counts(model) == hooks

    @pytest.mark.parametrize("keep", [[3], [None], [torch.Tensor], [nn.Linear(1, 1)], int])
    def test_wrong_type(self, keep: Any) -> None:
        with pytest.raises(TypeError, match=r"names \(str\) and torch.nn.Module classes"):
            cast_model(nn.Linear(1, 1), keep_fp32=keep)


@pytest.mark.parametrize("dtype", [FP32, torch.float64, torch.int8, torch.float8_e4m3fn, "bfloat16", None])
def test_bad_dtype(dtype: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"torch\.bfloat16 or torch\.float16"):
        cast_model(model, dtype)
    assert model.weight.dtype == FP32


class TestTies:
    @pytest.mark.parametrize("keep", ["lm_head", "embed_tokens"])
    def test_every_owner_is_kept(self, keep: str) -> None:
        model, batch = tiny_models.llama(tied=True)
        report = cast_model(model, keep_fp32=keep)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.lm_head.weight.dtype == FP32
        assert {"lm_head", "model.embed_tokens"} <= report.kept.keys() & set(report.boundaries)
        seen = output_dtypes(model, batch)
        assert seen["lm_head"] == seen["model.embed_tokens"] == {BF16}
        model(**batch).loss.backward()
        assert model.lm_head.weight.grad.dtype == FP32

    def test_chain_of_ties(self) -> None:
        config = transformers.BertConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
        model = transformers.BertForMaskedLM(config)
        head = model.cls.predictions
        assert head.bias is head.decoder.bias
        cast_model(model, keep_fp32="word_embeddings")
        assert head.decoder.weight is model.bert.embeddings.word_embeddings.weight
        assert head.bias is head.decoder.bias
        assert head.decoder.weight.dtype == head.decoder.bias.dtype == FP32
        assert head.transform.dense.weight.dtype == BF16
        tokens = torch.arange(8)[None]
        assert model(input_ids=tokens, labels=tokens).logits.dtype == BF16

    def test_chain_against_the_order_of_modules(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        first, second, third, _ = model
        first.weight, second.bias = second.weight, third.bias
        report = cast_model(model, keep_fp32="2")
        assert fp32_names(model) == {f"{i}.{leaf}" for i in range(3) for leaf in ("weight", "bias")}
        assert set(report.boundaries) == {"0", "1", "2"}
        assert model(torch.randn(2, 4, dtype=BF16)).dtype == BF16

    def test_module_with_two_names(self) -> None:
        shared = nn.Linear(4, 4)
        model = nn.Sequential(OrderedDict(first=shared, middle=nn.Linear(4, 4), second=shared))
        cast_model(model, keep_fp32="second")
        assert shared.weight.dtype == FP32 and hook_counts(shared) == [(1, 1)]
        assert model(torch.randn(2, 4, dtype=BF16)).dtype == BF16
        assert not cast_model(model).changed and hook_counts(shared) == [(1, 1)]

    def test_shared_buffer(self) -> None:
        model = nn.ModuleList([nn.Module(), nn.Module()])
        table = torch.randn(3)
        for module in model:
            module.register_buffer("table", table)
        cast_model(model)
        assert model[0].table is model[1].table and model[0].table.dtype == BF16


class TestNamedByTheModel:
    @pytest.mark.parametrize("gated", [False, True])
    def test_t5_feed_forward_output(self, gated: bool) -> None:
        model, batch = tiny_models.t5(gated=gated)
        report = cast_model(model)
        outer = [name for name, _ in model.named_modules() if name.endswith(".wo")]
        assert len(outer) == 2 * LAYERS and set(outer) <= set(report.boundaries)
        assert all("_keep_in_fp32_modules" in report.kept[name] for name in outer)
        seen = output_dtypes(model, batch)
        assert all(seen[name] == {BF16} for name in outer)

    @pytest.mark.parametrize("build", [tiny_models.t5, tiny_models.llama, tiny_models.gemma3])
    @pytest.mark.parametrize("attribute", ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"])
    @pytest.mark.parametrize(
        "names", [["wo"], ["q", "o_proj"], ["attn*v_proj", "Attention*v"], ["mlp.gate_proj.weight", "up"]]
    )
    def test_names_match_as_in_transformers(self, build: Any, attribute: str, names: list[str]) -> None:
        model, _ = build()
        model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict = set(), set()
        plain = copy.deepcopy(model)
        cast_model(plain)
        setattr(model, attribute, set(names))
        pattern, _, _ = build_glob_alternation(names)
        expected = {key for key in model.state_dict() if pattern.search(key)}
        cast_model(model)
        assert fp32_names(model) == expected | fp32_names(plain)

    def test_tensor_named_alone_is_left_to_the_models_code(self) -> None:
        class Router(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return nn.functional.linear(x.float(), self.weight)

        class Base(nn.Module):
            _keep_in_fp32_modules_strict = ("gate.weight", "sinks")
            _keep_in_fp32_modules = AttributeError()

        class Block(Base):
            def __init__(self) -> None:
                super().__init__()
                self.gate = Router(4, 2, bias=False)
                self.up = nn.Linear(4, 4)
                self.sinks = nn.Parameter(torch.zeros(2))

        model = nn.ModuleDict({"block": (block := Block()), "gate": nn.Linear(4, 4)})
        report = cast_model(model)
        assert fp32_names(model) == {"block.gate.weight", "block.sinks"}
        assert not report.boundaries
        assert block.gate(torch.randn(3, 4, dtype=BF16)).dtype == FP32


class FrozenBatchNorm2d(nn.Module):
    weight: torch.Tensor

    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.rand(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class ScaleRMSNorm(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(n))

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        assert x.dtype == FP32 and (gate is None or gate.dtype == FP32)
        return self.weight * x if gate is None else self.weight * x * gate


class ScaleRMSNormGated(ScaleRMSNorm):
    pass


class ScaleLayerNorm2d(ScaleRMSNorm):
    pass


class Derived(ScaleRMSNorm):
    pass


class LayerNormPerHead(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(n), nn.LayerNorm(n)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norms[1](self.norms[0](x))


class EncoderStableLayerNorm(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(n)
        self.dense = nn.Linear(n, n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.layer_norm(x))


class PreLayerNormModel(nn.Linear):
    pass


class TestPlainModules:
    def test_norm_first_with_fp32_input(self) -> None:
        norm = nn.LayerNorm(8)
        model = nn.Sequential(norm, nn.Linear(8, 4))
        x = torch.randn(5, 8, requires_grad=True)
        expected = copy.deepcopy(norm)(x).detach().to(BF16)
        cast_model(model)
        assert torch.equal(norm(x), expected)
        model(x).sum().backward()
        assert x.grad is not None and x.grad.dtype == FP32
        assert gradient_dtypes(norm) == {FP32} and gradient_dtypes(model[1]) == {BF16}

    def test_convolution_with_batch_norm(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
        report = cast_model(model)
        for _ in range(2):
            out = model(torch.randn(2, 3, 6, 6, dtype=BF16))
        out.sum().backward()
        norm: Any = model[1]
        assert out.dtype == BF16 and gradient_dtypes(norm) == {FP32}
        assert norm.running_mean.dtype == norm.running_var.dtype == FP32
        assert norm.num_batches_tracked.dtype == torch.int64 and norm.num_batches_tracked.item() == 2
        assert set(report.untouched) == {"1.num_batches_tracked"}

    @pytest.mark.parametrize(
        "norm",
        [
            nn.LayerNorm(4),
            nn.GroupNorm(2, 4),
            nn.RMSNorm(4),
            nn.BatchNorm1d(4),
            nn.BatchNorm1d(4, affine=False),
            nn.SyncBatchNorm(4),
            nn.InstanceNorm1d(4, affine=True),
            ScaleRMSNorm(4),
            ScaleRMSNormGated(4),
            ScaleLayerNorm2d(4),
            Derived(4),
            FrozenBatchNorm2d(4),
            LayerNormPerHead(4),
        ],
        ids=lambda norm: type(norm).__name__,
    )
    def test_kinds_of_norm(self, norm: nn.Module) -> None:
        model = nn.Sequential(nn.Linear(4, 4), norm.eval(), nn.Linear(4, 4))
        original = bits(norm)
        report = cast_model(model)
        assert_same_bits(bits(norm), original)
        assert set(report.boundaries) == {"1"}
        if not isinstance(norm, nn.SyncBatchNorm):
            x = torch.randn(2, 4, 4) if isinstance(norm, nn.InstanceNorm1d) else torch.randn(2, 4)
            assert norm(x.to(BF16)).dtype == BF16

    def test_keyword_inputs(self) -> None:
        norm = ScaleRMSNormGated(4)
        cast_model(norm)
        x = torch.randn(2, 4, dtype=BF16)
        assert norm(x=x, gate=x).dtype == BF16

    def test_norm_in_name_only(self) -> None:
        model = nn.Sequential(EncoderStableLayerNorm(4), PreLayerNormModel(4, 4))
        report = cast_model(model)
        assert fp32_names(model) == {"0.layer_norm.weight", "0.layer_norm.bias"}
        assert set(report.boundaries) == {"0.layer_norm"}
        assert model(torch.randn(2, 4, dtype=BF16)).dtype == BF16

    def test_norm_without_tensors(self) -> None:
        model = nn.Sequential(nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 4))
        report = cast_model(model)
        assert not report.boundaries and not report.kept
        assert model(torch.randn(2, 4, dtype=BF16)).dtype == BF16

    def test_buffers(self) -> None:
        model = nn.Linear(2, 2)
        values = {
            "persistent": torch.randn(3),
            "transient": torch.randn(3),
            "wide": torch.randn(3, dtype=torch.float64),
            "mask": torch.ones(3, dtype=torch.bool),
            "index": torch.arange(3),
            "phase": torch.randn(3, dtype=torch.complex64),
            "eighth": torch.randn(3).to(torch.float8_e4m3fn),
        }
        for name, value in values.items():
            model.register_buffer(name, value.clone(), persistent=name != "transient")
        keys = list(model.state_dict())
        report = cast_model(model)
        assert list(model.state_dict()) == keys and "transient" not in keys
        for name, value in values.items():
            cast = name in ("persistent", "transient", "wide")
            expected = value.to(BF16) if cast else value
            assert getattr(model, name).dtype == expected.dtype
            if name != "eighth":
                assert torch.equal(getattr(model, name), expected)
        assert set(report.untouched) == {"mask", "index", "phase", "eighth"}

    def test_quantized_parameters(self) -> None:
        model = nn.Linear(2, 2)
        model.packed = nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)
        model.tiny = nn.Parameter(torch.ones(4).to(torch.float8_e5m2), requires_grad=False)
        cast_model(model)
        assert model.packed.dtype == torch.uint8 and model.tiny.dtype == torch.float8_e5m2

    def test_frozen_parameters(self) -> None:
        model = nn.Linear(2, 2).requires_grad_(False)
        cast_model(model)
        assert model.weight.dtype == BF16 and not model.weight.requires_grad

    def test_memory_format(self) -> None:
        model = nn.Conv2d(3, 4, 3)
        model.weight.data = model.weight.data.contiguous(memory_format=torch.channels_last)
        cast_model(model)
        assert model.weight.is_contiguous(memory_format=torch.channels_last)


Pair = namedtuple("Pair", ["first", "second"])


class Returns(nn.Module):
    """Returns what `make` builds from its input, after checking that the input came in FP32."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        assert x.dtype == FP32
        return self.make(x * self.weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (x, [x, x], None),
        lambda x: [x, {"a": x}],
        lambda x: OrderedDict(a=x, b=(x, "text")),
        lambda x: Pair(x, torch.arange(3)),
        lambda x: BaseModelOutput(last_hidden_state=x, hidden_states=(x, x)),
    ],
    ids=["tuple", "list", "dict", "namedtuple", "ModelOutput"],
)
def test_output_structures(make: Any) -> None:
    model = Returns(make)
    x = torch.randn(3)
    plain = model(x)
    cast_model(model, keep_fp32=Returns)

    def check(value: Any, like: Any) -> None:
        assert type(value) is type(like)
        if isinstance(like, torch.Tensor):
            assert torch.equal(value, like.to(BF16) if like.is_floating_point() else like)
        elif isinstance(like, dict):
            assert list(value) == list(like)
            for key in like:
                check(value[key], like[key])
        elif isinstance(like, tuple | list):
            for one, two in zip(value, like, strict=True):
                check(one, two)
        else:
            assert value == like

    check(model(x), plain)
    if isinstance(plain, BaseModelOutput):
        assert model(x).last_hidden_state.dtype == BF16


def test_hooks_of_others_see_the_cast_output() -> None:
    norm, seen = nn.LayerNorm(4), []
    norm.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    cast_model(norm)
    norm(torch.randn(2, 4, dtype=BF16))
    assert seen == [BF16]


def test_existing_gradients() -> None:
    model, batch = tiny_models.llama(tied=True)
    model(**batch).loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    cast_model(model)
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == parameter.dtype
        assert torch.equal(parameter.grad, grads[name].to(parameter.dtype))
    model(**batch).loss.backward()
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in model.parameters())


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


ROPE = {
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
}


class TestRotary:
    @pytest.mark.parametrize("half", [BF16, FP16])
    @pytest.mark.parametrize("back", [False, True])
    @pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "phi3", "gpt_neox"])
    def test_rounded_frequencies_are_recomputed(self, name: str, back: bool, half: torch.dtype) -> None:
        (model, batch), (fresh, _) = (ARCHITECTURES[name].build(attention="eager") for _ in range(2))
        model = model.to(half).float() if back else model.to(half)
        report = cast_model(model)
        buffers = {path: value for path, value in fresh.named_buffers() if "inv_freq" in path}
        assert buffers and set(report.restored) == set(buffers) and not report.warnings
        assert "recomputed from the config" in str(report)
        for path, value in buffers.items():
            assert torch.equal(model.get_buffer(path), value), path
        assert bool(report.upcast) == (not back)
        for path in norm_modules(model):
            assert model.get_submodule(path).weight.dtype == FP32
            assert (f"{path}.weight" in report.upcast) == (not back)
        model(**batch).loss.backward()
        assert not cast_model(model).restored

    @pytest.mark.parametrize("kind", ROPE)
    def test_scaled_frequencies(self, kind: str) -> None:
        model, fresh = (tiny_models.llama(rope_parameters=dict(ROPE[kind]))[0] for _ in range(2))
        exact = fresh.model.rotary_emb.inv_freq
        assert not torch.equal(exact, exact.to(BF16).float())
        report = cast_model(model.to(BF16))
        assert torch.equal(model.model.rotary_emb.inv_freq, exact) and not report.warnings

    def test_frequencies_that_are_not_rounded_stay(self) -> None:
        model, _ = tiny_models.llama()
        model.model.rotary_emb.inv_freq.mul_(1.1)
        value = model.model.rotary_emb.inv_freq.clone()
        report = cast_model(model)
        assert torch.equal(model.model.rotary_emb.inv_freq, value)
        assert not report.restored and not report.warnings

    def test_frequencies_of_other_origin_stay(self) -> None:
        model, _ = tiny_models.llama()
        model.model.rotary_emb.inv_freq.copy_(torch.tensor([1.0, 0.5, 0.25, 0.125]))
        report = cast_model(model)
        assert model.model.rotary_emb.inv_freq.tolist() == [1.0, 0.5, 0.25, 0.125]
        assert not report.restored and len(report.warnings) == 1

    def test_no_way_to_recompute(self) -> None:
        class AngleRotaryEmbedding(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(4) / 4), persistent=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x

        report = cast_model(nn.Sequential(AngleRotaryEmbedding(), nn.Linear(2, 2)))
        assert not report.warnings and not report.boundaries and report.kept.keys() == {"0"}
        for rounded in (AngleRotaryEmbedding().to(BF16), AngleRotaryEmbedding().to(BF16).float()):
            report = cast_model(rounded)
            assert rounded.inv_freq.dtype == FP32 and not report.restored
            assert len(report.warnings) == 1 and "inv_freq" in report.warnings[0]
            assert f"warning: {report.warnings[0]}" in str(report)

    def test_output_follows_the_input(self) -> None:
        model, batch = tiny_models.llama()
        report = cast_model(model)
        assert "model.rotary_emb" in report.kept and "model.rotary_emb" not in report.boundaries
        assert output_dtypes(model, batch)["model.rotary_emb"] == {BF16}


class TestComposition:
    @pytest.mark.parametrize("through", ["deepcopy", "pickle", "torch.save"])
    def test_copies(self, through: str) -> None:
        model, batch = tiny_models.llama(tied=True)
        cast_model(model, keep_fp32=nn.Embedding)
        if through == "deepcopy":
            twin = copy.deepcopy(model)
        elif through == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            buffer = io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            twin = torch.load(buffer, weights_only=False)
        assert_same_bits(bits(twin), bits(model))
        assert hook_counts(twin) == hook_counts(model)
        one, two = model(**batch).loss, twin(**batch).loss
        two.backward()
        assert torch.equal(one, two)
        report = cast_model(twin)
        assert report.already_cast and not report.changed

    def test_report_copies(self) -> None:
        report = cast_model(tiny_models.llama()[0])
        assert pickle.loads(pickle.dumps(report)) == copy.deepcopy(report) == report
        with pytest.raises(AttributeError):
            report.dtype = FP16  # type: ignore[misc]

    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("name", ["llama", "bert", "t5"])
    def test_gradient_checkpointing(self, name: str, reentrant: bool) -> None:
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

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_compile(self, backend: str) -> None:
        torch.compiler.reset()
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), ScaleRMSNorm(4))
        cast_model(model, keep_fp32="2")
        x = torch.randn(3, 4, dtype=BF16)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert torch.equal(compiled(x), model(x))
        compiled(x).sum().backward()
        assert gradient_dtypes(model[1]) == {FP32}

    def test_compile_language_model(self) -> None:
        torch.compiler.reset()
        model, batch = tiny_models.llama(num_hidden_layers=1)
        cast_model(model)
        compiled: Any = torch.compile(model, backend="aot_eager")
        loss = compiled(**batch).loss
        loss.backward()
        assert torch.equal(loss, model(**batch).loss)
        assert cast_model(compiled).already_cast

    def test_meta_device(self) -> None:
        with torch.device("meta"):
            model, _ = tiny_models.llama(tied=True)
        identities = [id(parameter) for parameter in model.parameters()]
        report = cast_model(model.to(BF16), keep_fp32="layers.0.mlp")
        assert [id(parameter) for parameter in model.parameters()] == identities
        assert all(parameter.is_meta for parameter in model.parameters())
        reference, _ = tiny_models.llama(tied=True)
        cast_model(reference, keep_fp32="layers.0.mlp")
        assert dtypes(model) == dtypes(reference)
        assert report.after == cast_model(reference).after and not report.warnings
        assert hook_counts(model) == hook_counts(reference)

    def test_fused_inference_path_of_torch(self) -> None:
        model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        exact = copy.deepcopy(model)
        cast_model(model)
        x = torch.randn(2, 3, 8)
        with torch.no_grad():
            out = model(x.to(BF16))
            # About 20 roundings of at most 2^-8 each, adding up like a root, of values that reach about 3.
            assert out.dtype == BF16 and (out - exact(x)).abs().max() < 20**0.5 * 2**-8 * 3

    def test_recurrent_layers(self) -> None:
        model = nn.LSTM(4, 4)
        cast_model(model)
        out, _ = model(torch.randn(3, 2, 4, dtype=BF16))
        out.sum().backward()
        assert out.dtype == BF16


@pytest.fixture
def process_group(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class TestWrappers:
    def test_data_parallel(self, process_group: None) -> None:
        model, batch = tiny_models.llama(tied=True)
        cast_model(model)
        single = copy.deepcopy(model)
        single(**batch).loss.backward()
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped(**batch).loss.backward()
        for one, two in zip(single.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad)
        for target in (wrapped, nn.Sequential(wrapped)):
            with pytest.raises(ValueError, match=r"cast before prepare.*DistributedDataParallel"):
                cast_model(target)

    def test_fully_sharded(self, process_group: None) -> None:
        from torch.distributed.fsdp import fully_shard

        model, batch = tiny_models.llama()
        cast_model(model)
        single = copy.deepcopy(model)
        loss = single(**batch).loss
        loss.backward()
        mesh = init_device_mesh("cpu", (1,))
        norms = [module for name, module in model.named_modules() if NORM_PATH.search(name)]
        fully_shard(norms, mesh=mesh, reshard_after_forward=False)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        sharded = model(**batch).loss
        sharded.backward()
        assert torch.equal(sharded, loss)
        for one, two in zip(single.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad.full_tensor())
        for target in (model, norms[0]):
            with pytest.raises(ValueError, match="cast before prepare"):
                cast_model(target)

    def test_sharded_tensors(self, process_group: None) -> None:
        from torch.distributed.tensor import distribute_tensor

        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (1,))))
        with pytest.raises(ValueError, match=r"cast before prepare.*DTensor"):
            cast_model(model)


class TestReport:
    def test_counts(self) -> None:
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, bias=False))
        model[2].register_buffer("scale", torch.ones(7))
        report = cast_model(model)
        # Linear 3*5 + 5, norm 5 + 5, linear 5*2; buffers: mean and variance 5 + 5, scale 7, a counter.
        assert report.before == {FP32: (40, 17, 4 * 57), torch.int64: (0, 1, 8)}
        assert report.after == {FP32: (10, 10, 4 * 20), BF16: (30, 7, 2 * 37), torch.int64: (0, 1, 8)}
        assert set(report.cast) == {"0.weight", "0.bias", "2.weight", "2.scale"}
        assert report.dtype == BF16 and report.kept == {"1": "norm (BatchNorm1d)"}

    def test_ties_count_once(self) -> None:
        model, _ = tiny_models.llama(tied=True)
        total = sum(parameter.numel() for parameter in model.parameters())
        report = cast_model(model)
        assert report.before[FP32].parameters == total
        assert sum(row.parameters for row in report.after.values()) == total

    def test_text(self) -> None:
        model, _ = tiny_models.llama()
        text = str(cast_model(model, keep_fp32="lm_head"))
        for line in (
            r"^cast to torch\.bfloat16: 15 tensors converted$",
            r"^  before torch\.float32 +[\d,]+ parameters, 8 buffer elements, [\d,]+ bytes$",
            r"^  after  torch\.bfloat16 ",
            r"^    model\.layers\.\*\.input_layernorm \(x2\): norm \(LlamaRMSNorm\)$",
            r"^    model\.norm: norm \(LlamaRMSNorm\)$",
            r"^    model\.rotary_emb: rotary \(LlamaRotaryEmbedding\)$",
            r"^    lm_head: keep_fp32 'lm_head'$",
        ):
            assert re.search(line, text, re.MULTILINE), (line, text)
        assert "upcast" not in text and "warning" not in text and "recomputed" not in text

    def test_text_of_a_model_loaded_in_bf16(self) -> None:
        model, _ = tiny_models.bert()
        text = str(cast_model(model.to(BF16)))
        assert re.search(r"LayerNorm\.weight: was torch\.bfloat16", text), text
        assert re.search(r"position_ids: Tensor of torch\.int64", text), text

    def test_text_of_a_kept_root(self) -> None:
        assert "(model): norm (LayerNorm)" in str(cast_model(nn.LayerNorm(4)))


def test_only_torch_is_imported() -> None:
    tree = ast.parse(Path(casting.__file__).read_text())
    modules = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in modules} & {"transformers", "accelerate", "peft", "hf_lowprec"}


def test_builders_make_models_without_dropout() -> None:
    model, batch = tiny_models.vit()
    assert torch.equal(model(**batch).logits, model(**batch).logits)
    assert model(**batch).logits.shape == (2, CLASSES)
