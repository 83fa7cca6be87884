"""Planted defects are found by name, healthy runs raise nothing, and all codes are documented."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Adafactor

import hf_lowprec
from hf_lowprec.monitor.rules import FAULTS, is_lost
from hf_lowprec.rounding.nearest import spacing
from tests.support.training.tiny_trainer import counting_data, llama

STEPS = 24
ROOT = Path(__file__).resolve().parents[2]
MODULES = [ast.parse(path.read_text("utf-8")) for path in (ROOT / "hf_lowprec").rglob("*.py")]


def model_of(dtype: torch.dtype | None, seed: int = 0) -> nn.Module:
    """A tiny Llama, cast as a whole to `dtype`, or by `cast_model` if that is None."""
    model = llama(seed)
    if dtype is None:
        hf_lowprec.cast_model(model)
        return model
    return model.to(dtype)


def train(model: nn.Module, make: Callable, every: int = 4, steps: int = STEPS) -> list:
    """All findings of a short run."""
    optimizer = make([param for param in model.parameters() if param.requires_grad])
    monitor = hf_lowprec.PrecisionMonitor(optimizer, model, every=every)
    rows = counting_data()
    found = {}
    for k in range(steps):
        batch = [rows[(8 * k + i) % len(rows)]["input_ids"] for i in range(8)]
        ids = torch.stack(batch)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found |= {finding.code: finding for finding in monitor.findings()}
    return list(found.values())


def adamw(lr: float = 1e-3, **options) -> Callable:
    return lambda params: hf_lowprec.AdamW(params, lr=lr, **options)


def only(findings: list, code: str):
    (finding,) = [finding for finding in findings if finding.code == code]
    return finding


def test_every_code_is_in_the_table_and_none_is_left_over():
    calls = [node for tree in MODULES for node in ast.walk(tree) if isinstance(node, ast.Call)]
    functions = [ast.unparse(call.func) for call in calls]
    reports = [call for call, name in zip(calls, functions, strict=True) if name == "report"]
    given = [call.args[0].value for call in reports if isinstance(call.args[0], ast.Constant)]
    assert functions.count("Finding") == 1  # in `report`, which looks codes up
    assert len(given) > 15 and {*given} == {*FAULTS}


def test_every_code_is_documented_in_its_words():
    table = (ROOT / "docs" / "reference" / "cli.md").read_text("utf-8").partition("| code | what is wrong |")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", table.partition("\n\n")[0], flags=re.MULTILINE)
    assert rows == [(code, fault.what) for code, fault in FAULTS.items()]


def test_a_share_is_lost_if_it_is_above_one_half_by_three_standard_errors():
    numbers = {"lost_updates": 0.75, "lost_updates_error": 0.0625}  # four standard errors
    assert is_lost(numbers, "lost_updates") and is_lost({"lost_updates": 0.75}, "lost_updates")
    assert not is_lost({**numbers, "lost_updates_error": 0.125}, "lost_updates")  # two
    assert not is_lost(numbers, "lost_weight_decay")


@pytest.mark.combinations(1)
@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.every_case) for seed in range(5, 10))]
)
@pytest.mark.parametrize("way", ["fp32", "kahan", "stochastic"])
def test_healthy_runs_raise_nothing(way, seed):
    if way == "fp32":
        findings = train(model_of(torch.float32, seed), lambda p: torch.optim.AdamW(p, lr=1e-3), steps=12)
    else:
        lr = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)[seed % 5]
        options = {"rounding": way, "weight_decay": 0.1 * (seed % 2), "seed": seed}
        findings = train(model_of(None, seed), adamw(lr, **options), steps=12)
    assert findings == []


def test_a_stock_optimizer_on_bf16_weights():
    findings = train(model_of(torch.bfloat16), lambda p: torch.optim.AdamW(p, lr=1e-6), steps=1, every=1)
    message = only(findings, "updates_lost").message
    assert re.match(
        r"Weight updates are lost in rounding: only 1\.\d% of the 16-bit weights changed in step 1", message
    )
    assert "(torch.optim.AdamW, learning rate 1e-06)" in message
    assert "optim='adamw_bf16_split' or hf_lowprec.AdamW with rounding='split'" in message
    norms = only(findings, "norms_never_moved")
    assert "model.norm.weight" in norms.tensors
    assert "cast_model, which keeps norms in FP32" in norms.message


STOCK = {
    "AdamW": (torch.optim.AdamW, 1e-5, 1e-3),
    "fused": (lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True), 1e-5, 1e-3),
    "SGD": (lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9), 1e-3, 1e-1),
    "Adagrad": (torch.optim.Adagrad, 1e-5, 1e-2),
    "RMSprop": (torch.optim.RMSprop, 1e-6, 1e-3),
    "Adafactor": (torch.optim.Adafactor, 1e-3, 3e-2),
    "transformers": (lambda p, lr: Adafactor(p, lr=lr, scale_parameter=False, relative_step=False), 1e-5, 1e-3),
}
"""Optimizers that round to nearest, with a learning rate at which BF16 matrices stay as they are, and one at which they
learn."""


FEW = ("AdamW", "SGD", "Adafactor", "transformers")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.every_case) for name in STOCK]
)
def test_stock_optimizers_are_told_of_lost_updates_and_of_no_others(name):
    make, too_small, large_enough = STOCK[name]
    for lr, codes in ((too_small, ["updates_lost"]), (large_enough, [])):
        findings = train(model_of(None), lambda p, lr=lr: make(p, lr=lr), every=1)
        assert [finding.code for finding in findings] == codes, lr


class OfAnotherLibrary(torch.optim.SGD):
    """Momentum, on weights that are rounded to nearest, or stochastically by torch's own random numbers."""

    random = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param, dtype=torch.float64))
                exact = param.double() - group["lr"] * momentum.mul_(0.9).add_(param.grad)
                if self.random and param.dtype == torch.bfloat16:
                    exact += spacing(param, torch.bfloat16) * (torch.rand(param.shape) - 0.5)
                param.copy_(exact.to(param.dtype))


class Stochastic(OfAnotherLibrary):
    random = True


@pytest.mark.parametrize("lr", [1e-4, *(pytest.param(lr, marks=pytest.mark.every_case) for lr in (1e-5, 1e-3))])
def test_how_other_libraries_round_is_seen_in_which_weights_move(lr):
    """As few weights change in a step if updates are rounded stochastically, but all of them in time."""
    for cls, lost in ((OfAnotherLibrary, True), (Stochastic, False)):
        findings = train(model_of(None), lambda p, cls=cls: cls(p, lr=lr), every=25, steps=50)
        assert ("updates_lost" in [finding.code for finding in findings]) is lost, cls


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_a_learning_rate_of_zero_loses_nothing(cls, dtype):
    """The first step of a warm-up, of updates that are known and of unknown ones."""
    assert train(model_of(dtype), lambda p: cls(p, lr=0.0), steps=1, every=1) == []


def test_fp16_weights_are_not_told_of_split_weights():
    """Only Kahan summation supports them."""
    for make, advice in (
        (lambda p: torch.optim.SGD(p, lr=1e-6), "optim='sgd_bf16_kahan' or hf_lowprec.SGD with rounding='kahan'"),
        (adamw(1e-7, rounding="nearest"), "Use rounding='kahan', which stores all of them"),
    ):
        model = model_of(torch.float16)
        message = only(train(model, make, steps=1, every=1), "updates_lost").message
        assert advice in message and "split" not in message


def test_remedies_for_what_one_step_loses():
    def said(code: str, **options) -> str:
        return only(train(model_of(None), adamw(**options), steps=1, every=1), code).message

    textbook = {"rounding": "kahan", "state_rounding": "nearest"}
    too_small = said("updates_lost", lr=1e-13, rounding="split", weight_decay=0)
    assert too_small.endswith("They are too small for FP32 weights as well: raise the learning rate.")
    assert "Remove state_rounding='nearest', with" in said("updates_lost", lr=1e-9, **textbook)
    # A thousandth of each weight is a quarter of the smallest spacing.
    assert "weight_decay=100" in said("weight_decay_lost", lr=1e-5, rounding="nearest", weight_decay=100.0)


def test_a_frozen_second_moment():
    (finding,) = train(model_of(None), adamw(state_rounding="nearest"))
    assert finding.code == "second_moment_frozen"
    assert "Remove state_rounding='nearest'" in finding.message


def test_a_frozen_norm():
    """Norms cast with the rest, at a learning rate that moves all other weights."""
    model = model_of(torch.bfloat16)
    (finding,) = train(model, adamw(1e-3, rounding="nearest", weight_decay=0), every=1, steps=1)
    assert finding.code == "norms_never_moved"
    norms = {name for name, _ in model.named_parameters() if "norm" in name}
    assert set(finding.tensors) == norms


def test_a_layer_cut_off_by_detach():
    model = model_of(None)
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output.detach())
    assert train(model, adamw(), every=1, steps=2) == [], "two measurements are too few"
    finding = only(train(model, adamw(), every=1, steps=3), "not_trained")
    names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    assert finding.tensors == (*names, "model.layers.0.post_attention_layernorm.weight")
    assert "although the same weights of later layers had one" in finding.message
    assert "Look for detach()" in finding.message


def detach_all_but_the_head(model: nn.Module) -> None:
    model.model.register_forward_hook(
        lambda module, inputs, output: setattr(output, "last_hidden_state", output[0].detach())
    )


def make_gradients_zero(model: nn.Module) -> None:
    model.model.layers[0].mlp.up_proj.weight.register_hook(torch.zeros_like)


def leave_out_a_norm(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param is not model.model.norm.weight]


def replace_a_norm(model: nn.Module) -> list[nn.Parameter]:
    old = list(model.parameters())
    model.model.norm.weight = nn.Parameter(torch.ones(32))
    return old


NAMES = tuple(name for name, _ in llama().named_parameters())


@pytest.mark.parametrize(
    ("change", "tensors", "said"),
    [
        (detach_all_but_the_head, NAMES[:-1], "are more than half of all weights"),
        (make_gradients_zero, ("model.layers.0.mlp.up_proj.weight",), "zeros in all of 7 measured steps"),
        (leave_out_a_norm, ("model.norm.weight",), "have gradients but are not among the optimizer's parameters"),
        (replace_a_norm, (f"param_groups[0]['params'][{len(NAMES) - 2}]",), "Build the optimizer after"),
    ],
)
def test_tensors_that_are_not_trained(change, tensors, said):
    """The optimizer has the parameters that `change` returns, or those of the model."""
    model = model_of(None)
    params = change(model)
    finding = only(train(model, lambda trained: hf_lowprec.AdamW(params or trained)), "not_trained")
    assert finding.tensors == tensors and said in finding.message


@pytest.mark.parametrize("make", [adamw(), lambda params: torch.optim.AdamW(params, lr=1e-1)], ids=["ours", "torch's"])
def test_parts_that_the_loss_does_not_use_are_no_finding(make):
    """A pooler, a mask token, a last layer of which only the input is used, as in LLaVA's vision tower."""
    model = model_of(None)
    model.pooler = nn.Linear(32, 32).bfloat16()
    model.mask_token = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    last = model.model.layers[-1]
    last.forward = lambda hidden, *args, **kwargs: hidden
    assert "not_trained" not in {finding.code for finding in train(model, make)}


@pytest.mark.parametrize("make", [adamw(), lambda params: torch.optim.Adafactor(params, lr=1e-3)])
def test_gradients_that_are_all_zero(make):
    """As those of GRPO are while all rewards of a prompt are equal. Freezing all weights is no remedy."""
    model = model_of(None)
    for param in model.parameters():
        param.register_hook(torch.zeros_like)
    (finding,) = train(model, make)
    assert finding.code == "not_trained" and finding.tensors == ()
    assert "all gradients were exactly zero in each of 7 measured steps" in finding.message
    assert "reward" in finding.message and "requires_grad" not in finding.message


def test_embeddings_of_few_words_have_a_gradient():
    """Only one row of many has a gradient, and the sample may miss it."""
    embedding = nn.Embedding(100_000, 8, dtype=torch.bfloat16)
    optimizer = hf_lowprec.AdamW(embedding.parameters())
    monitor = hf_lowprec.PrecisionMonitor(optimizer, embedding, every=1)
    for _ in range(4):
        embedding(torch.tensor([4321])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert monitor.findings() == []


def test_an_unused_tensor_that_the_optimizer_does_not_have():
    model = model_of(None)
    model.mask_token = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    assert train(model, lambda params: hf_lowprec.AdamW([p for p in params if p is not model.mask_token])) == []


def test_a_head_added_after_the_cast():
    model = model_of(None)
    model.lm_head = nn.Linear(32, 64, bias=False)
    model.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
    finding = only(train(model, adamw()), "left_in_fp32")
    assert finding.tensors == ("lm_head.weight",)


def train_on_a_bad_batch(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[list, list]:
    """The findings after each of three steps, the second of which has a loss of NaN; and the weights' finiteness."""
    monitor = hf_lowprec.PrecisionMonitor(optimizer, model, every=1)
    ids = torch.stack([row["input_ids"] for row in counting_data(8)])
    found = []
    for factor in (1.0, float("nan"), 1.0):
        (model(input_ids=ids, labels=ids).loss * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({finding.code: finding for finding in monitor.findings()})
    return found, [bool(param.isfinite().all()) for param in model.parameters()]


@pytest.mark.parametrize(
    ("options", "advised"),
    [({}, True), ({"rounding": "stochastic"}, True), ({"gradient_release": True}, False), (None, False)],
)
def test_weights_that_a_bad_batch_has_made_nan(options, advised):
    """Training goes on with them, and Trainer logs losses of 0."""
    model = model_of(None)
    params = model.parameters()
    optimizer = torch.optim.AdamW(params) if options is None else adamw(**options)(params)
    (before, *after), finite = train_on_a_bad_batch(optimizer, model)
    assert "not_finite" not in before and not any(finite)
    for step, found in enumerate(after, 2):
        finding = found["not_finite"]
        assert "lm_head.weight" in finding.tensors and f"in step {step}" in finding.message
        assert ("skip_nonfinite=True" in finding.message) == advised


def test_a_bad_batch_that_is_skipped_is_no_finding():
    model = model_of(None)
    optimizer = adamw(skip_nonfinite=True)(model.parameters())
    found, finite = train_on_a_bad_batch(optimizer, model)
    assert optimizer.skipped_steps == 1 and all(finite) and found == [{}, {}, {}]
