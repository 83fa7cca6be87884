"""What the scripts of hosts share: a saved tiny model, and what must be true of a run's optimizer and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from counting_text import preferences, sentences, tokenizer
from tiny_trainer import llama
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

import hf_lowprec
from hf_lowprec.optim import LowPrecisionOptimizer

assert "site-packages" in hf_lowprec.__file__, hf_lowprec.__file__


def saved_model(folder: str | Path = "model") -> str:
    """Save a tiny Llama in FP32 and its tokenizer to `folder`; return its path."""
    model = llama()
    model.config.update({"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512})
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(Path(folder).resolve())


def saved_rows(rows: list[dict[str, Any]], file: str | Path) -> str:
    """Save rows as a JSON Lines file; return its path."""
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(Path(file).resolve())


def texts(rows: int = 32) -> list[dict[str, str]]:
    """Rows with a `text`."""
    return [{"text": text} for text in sentences(rows)]


def answers(rows: int = 32) -> list[dict[str, str]]:
    """Rows with a `prompt`, a `chosen` and a `rejected` answer."""
    return preferences(rows)


class Steps:
    """The steps that optimizers of this package take in this process, whoever builds them."""

    def __init__(self) -> None:
        self.optimizer: LowPrecisionOptimizer | None = None
        self.count = 0
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def check(self, count: int, lr: float, **options: Any) -> None:
        """Assert what must be true after `count` steps with learning rates up to `lr`, and stop counting.

        The optimizer is ours, its groups have `options`, the model is BF16 except for what has one dimension, and the
        FP32 values of nearly all weights have moved since the first step, few further than AdamW moves them. With a
        learning rate such as 1e-6, weights rounded to nearest would stay where they are.
        """
        self._hook.remove()
        assert self.optimizer is not None, "no optimizer of hf_lowprec has taken a step"
        assert self.count == count, f"{self.count} steps, not {count}"
        for group in self.optimizer.param_groups:
            found = {key: group[key] for key in options}
            assert found == options, f"{found}, not {options}"
            assert 0 <= group["lr"] <= lr, f"lr {group['lr']}"
        for param in self._params():
            assert param.ndim < 2 or param.dtype == torch.bfloat16, f"{param.dtype} for {tuple(param.shape)}"
        moved = [(after - before).abs() for before, after in zip(self._first, self._values(), strict=True)]
        flat = torch.cat([one.flatten() for one in moved])
        share = (flat > 0).double().mean().item()
        assert share > 0.9, f"only {share:.0%} of the weights have moved"
        far = (flat > 3 * lr * count).double().mean().item()
        assert far < 0.01, f"{far:.0%} of the weights have moved further than {3 * lr * count}"
        print(f"{type(self.optimizer).__name__}: {count} steps, {share:.1%} of the weights have moved")

    def _after_step(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        if not isinstance(optimizer, LowPrecisionOptimizer):
            return
        if self.optimizer is not optimizer:
            self.optimizer, self.count = optimizer, 0
        self.count += 1
        if self.count == 1:
            self._first = self._values()

    def _params(self) -> list[nn.Parameter]:
        assert self.optimizer is not None
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _values(self) -> list[torch.Tensor]:
        values = hf_lowprec.fp32_state_dict(nn.ParameterList(self._params()), self.optimizer)
        return [(value.full_tensor() if isinstance(value, DTensor) else value).clone() for value in values.values()]
