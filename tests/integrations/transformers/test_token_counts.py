"""The loss that Trainer logs, and its gradients, are divided by the number of tokens, which 16 bits cannot hold."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

from tests.support.processes.ranks import on_ranks
from tests.support.training.tiny_trainer import arguments

LENGTH = 65  # 64 of them are predicted
# Rounded to BF16 they are 256, 264 and 4096: off by 0.39%, 0.38% and 0.36%.
COUNTS = (257, 263, 4111)

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.16"),
    reason="before, Trainer itself counted the first label of a sequence, for which there is no prediction",
)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **size))


def sequences(tokens: int) -> list[dict[str, torch.Tensor]]:
    """Four micro-batches of one length, of which `tokens` labels are not ignored: the first ones."""
    rows = 4 * -(-tokens // (4 * (LENGTH - 1)))
    inputs = torch.randint(0, 64, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = inputs.clone()
    ignored = torch.arange(rows * (LENGTH - 1)).view(rows, -1) >= tokens
    labels[:, 1:] = labels[:, 1:].masked_fill(ignored, -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(inputs, labels, strict=True)]


class Gradients(TrainerCallback):
    """Keeps the gradients of the step, before it is taken."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.found = {name: p.grad.detach().float().clone() for name, p in model.named_parameters()}


def stepped(tokens: int, micro_batches: int, optim: str, ranks: int = 1) -> tuple[float, dict[str, torch.Tensor]]:
    """The logged loss and the gradients of one step."""
    data, gradients = sequences(tokens), Gradients()
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(
            folder,
            optim=optim,
            max_steps=1,
            per_device_train_batch_size=len(data) // (micro_batches * ranks),
            gradient_accumulation_steps=micro_batches,
            max_grad_norm=0,
            logging_steps=1,
        )
        trainer = Trainer(llama(), args, train_dataset=data, callbacks=[gradients])
        trainer.train()
    (loss,) = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return loss, gradients.found


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


def step_on_ranks(out: str, *arguments: Any) -> None:
    dist.init_process_group("gloo")
    step = stepped(*arguments, ranks=dist.get_world_size())
    if dist.get_rank() == 0:
        torch.save(step, out)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("tokens", "micro_batches"), [pytest.param(257, 1, marks=pytest.mark.every_case), (4111, 2)])
def test_two_ranks(tmp_path: Path, tokens: int, micro_batches: int) -> None:
    out = tmp_path / "step.pt"
    on_ranks(step_on_ranks, 2, out, tokens, micro_batches, "adamw_bf16_kahan")
    assert_normalized(*torch.load(out), tokens, 2.0**-8)
