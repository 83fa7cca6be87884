"""A model whose code says `.float()` fails under Trainer with advice, and trains once that is followed."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer

from tests.support.training.tiny_trainer import arguments, losses


class Pooler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.dense(x.float().mean(1)).tanh())


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.encoder = nn.Sequential(nn.Linear(8, 8), Pooler())
        self.classify = nn.Linear(8, 2)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.classify(self.encoder(self.embed(tokens)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def trainer(tmp_path: Path, optim_args: str | None) -> Trainer:
    torch.manual_seed(0)
    rows = [{"tokens": torch.randint(0, 16, (5,)), "labels": i % 2} for i in range(16)]
    args = arguments(tmp_path, optim="adamw_bf16_kahan", optim_args=optim_args, max_steps=2, logging_steps=1)
    return Trainer(Classifier(), args, train_dataset=rows)


def test_the_error_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="must have the same dtype") as caught:
        trainer(tmp_path, None).train()
    assert "'encoder.1.dense' (Linear), called by 'encoder.1' (Pooler)" in str(caught.value)
    found = re.search(r'optim_args="([^"]*)"', str(caught.value))
    assert found is not None
    following = trainer(tmp_path, found[1])
    following.train()
    assert len(losses(following)) == 2
    assert following.model.encoder[1].dense.weight.dtype == torch.float32
    assert following.model.classify.weight.dtype == torch.bfloat16
