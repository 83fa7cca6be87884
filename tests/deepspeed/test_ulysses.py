"""DeepSpeed's sequence parallelism (Ulysses): each of two ranks has one half of every sequence."""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hf_lowprec
from hf_lowprec.integrations.deepspeed.initialize import initialize_deepspeed
from tests.support.models import tiny_models
from tests.support.processes.ranks import on_ranks

HALVES, LENGTH = 2, 32
BF16_HALF_ULP = 2**-9


def model() -> nn.Module:
    built, _ = tiny_models.llama()
    hf_lowprec.cast_model(built)
    return built


def sequence(number: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, of shape (1, LENGTH)."""
    tokens = torch.randint(3, 96, (1, LENGTH + 1), generator=torch.Generator().manual_seed(number))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(trained: nn.Module, tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    logits = trained(input_ids=tokens, position_ids=positions).logits
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def norms(stage: int) -> tuple[float, float]:
    """The gradient norm of the halves, and that of whole sequences in one process."""
    deepspeed.init_distributed("gloo")
    rank, sequences = dist.get_rank(), dist.get_world_size() // HALVES
    whole, positions = model(), torch.arange(LENGTH)[None]
    for number in range(sequences):  # before Ulysses replaces the attention of every model
        (loss_of(whole, *sequence(number), positions) / sequences).backward()
    expected = torch.stack([param.grad.double().square().sum() for param in whole.parameters()]).sum().sqrt()

    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    trained = model()
    groups = UlyssesSPAttentionHF.register_with_transformers(trained, "sdpa", HALVES, micro_batch_size=1)
    optimizer = hf_lowprec.AdamW(trained.parameters(), lr=1e-3, rounding="split")
    config = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": sequences, "zero_optimization": {"stage": stage}}
    engine, *_ = initialize_deepspeed(trained, optimizer, config, mpu=groups)
    half = slice(rank % HALVES * LENGTH // HALVES, (rank % HALVES + 1) * LENGTH // HALVES)
    tokens, labels = (each[:, half] for each in sequence(rank // HALVES))
    engine.backward(loss_of(engine, tokens, labels, positions[:, half]) / HALVES)
    engine.step()
    return float(optimizer.grad_norm), float(expected)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "stage"), [(4, 2), *(pytest.param(*case, marks=pytest.mark.every_case) for case in ((2, 2), (4, 3)))]
)
def test_the_norm_is_that_of_whole_sequences(ranks, stage):
    """A rank's gradient is rounded to BF16, and so is the mean: twice half an ulp of each element, at most."""
    found, expected = on_ranks(norms, ranks, stage)
    assert found == pytest.approx(expected, rel=2 * BF16_HALF_ULP)
