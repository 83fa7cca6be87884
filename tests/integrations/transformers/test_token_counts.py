"""The loss that Trainer logs, and its gradients, are divided by the number of tokens, which 16 bits cannot hold."""

from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from torch.nn.functional import cross_entropy

from tests.scripts.token_counts import llama, sequences, stepped
from tests.support.processes.ranks import run_ranks

# Rounded to BF16 they are 256, 264 and 4096: off by 0.39%, 0.38% and 0.36%.
COUNTS = (257, 263, 4111)

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.16"),
    reason="before, Trainer itself counted the first label of a sequence, for which there is no prediction",
)


def by_formula(tokens: int) -> tuple[float, dict[str, torch.Tensor]]:
    """All sequences at once in FP64: the sum over tokens, divided by their number."""
    model = llama().double()
    data = sequences(tokens)
    inputs, labels = (torch.stack([row[key] for row in data]) for key in ("input_ids", "labels"))
    logits = model(input_ids=inputs).logits[:, :-1]
    loss = cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), reduction="sum") / tokens
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def scale(ours: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Of `ours` along `exact`: 1 if they are equal but for what is orthogonal to it."""
    one, two = (torch.cat([g[name].double().view(-1) for name in exact]) for g in (ours, exact))
    return (one @ two / (two @ two)).item()


def assert_normalized(loss: float, gradients: dict[str, torch.Tensor], tokens: int, unit: float) -> None:
    """Check that neither is off by as much as with a rounded count.

    Each element of a gradient errs by some twenty roundings of `unit` at random. Projected on the exact gradient the
    errors of 14,000 elements cancel, to √20 / √14,000 = unit / 26; a bias of the roundings may add as much. Rounding a
    logit of a new model, 0.1, moves a token's loss, which is 4, by `unit` / 40, at random.
    """
    expected, exact = by_formula(tokens)
    assert abs(loss / expected - 1) < unit / 16
    assert abs(scale(gradients, exact) - 1) < unit / 8


@pytest.mark.combinations(1)
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("tokens", COUNTS)
def test_one_rank(tokens: int, micro_batches: int) -> None:
    assert_normalized(*stepped(tokens, micro_batches, "adamw_bf16_sr"), tokens, 2.0**-8)


@pytest.mark.every_case
def test_fp32_is_the_formula() -> None:
    assert_normalized(*stepped(257, 4, "adamw_torch"), 257, 2.0**-18)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("tokens", "micro_batches"), [pytest.param(257, 1, marks=pytest.mark.every_case), (4111, 2)])
def test_two_ranks(tmp_path: Path, tokens: int, micro_batches: int) -> None:
    out = tmp_path / "step.pt"
    run_ranks("token_counts.py", 2, str(out), str(tokens), str(micro_batches), "adamw_bf16_kahan")
    assert_normalized(*torch.load(out), tokens, 2.0**-8)
