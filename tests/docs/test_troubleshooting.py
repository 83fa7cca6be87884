"""Every message that the troubleshooting page quotes is one that a user can meet."""

from __future__ import annotations

import ast
import re
from argparse import ArgumentError
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.fsdp import fully_shard
from transformers import HfArgumentParser, TrainingArguments, training_args

import hf_lowprec

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"


def quoted() -> list[str]:
    """The messages among the headings, with `…` for what varies."""
    return re.findall(r"^### `([^`]+)`", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)


def texts(tree: ast.AST) -> list[str]:
    """The strings in a module, docstrings excluded, with `…` for what varies."""
    found, parts = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts.update(map(id, node.values))
            found.append("".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            parts.add(id(node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            found.append(re.sub(r"%[sr]", "…", node.value))
    return found


def pattern(message: str) -> re.Pattern[str]:
    """A regular expression for a quoted message: `…` stands for any text."""
    return re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)


@pytest.fixture
def of_libraries(two_fake_ranks) -> dict[str, str]:
    """Messages of torch and transformers that the page quotes, as they are in the versions installed."""
    raised = {}

    def provoke(quoted: str, call: Callable[[], object]) -> None:
        with pytest.raises((ArgumentError, AssertionError, RuntimeError, TypeError, ValueError)) as caught:
            call()
        raised[quoted] = str(caught.value)

    linear = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    provoke("mat1 and mat2 must have the same dtype", lambda: linear(torch.zeros(2, 2)))
    provoke("expected m1 and m2 to have the same dtype", lambda: torch.zeros(2, 2) @ linear.weight)
    provoke("Got unsupported ScalarType BFloat16", lambda: linear.weight.detach().numpy())
    provoke("… is not a valid OptimizerNames", lambda: TrainingArguments(optim="adamw_bf16_khan"))
    with patch.object(training_args, "is_torch_bf16_gpu_available", return_value=False):
        provoke("Your setup doesn't support bf16/gpu.", lambda: TrainingArguments(bf16=True))
    parser = HfArgumentParser(TrainingArguments, exit_on_error=False)
    provoke("argument --optim: invalid choice: …", lambda: parser.parse_args(["--optim", "adamw_bf16_khan"]))
    half = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    scaler, optimizer = torch.amp.GradScaler("cpu"), hf_lowprec.AdamW([half], rounding="kahan")
    scaler.scale(half.sum()).backward()
    provoke("Attempting to unscale FP16 gradients.", lambda: scaler.step(optimizer))
    states = {"optimizer.param_groups.0.rounding": torch.zeros(1)}
    provoke(
        "Missing key in checkpoint state_dict: …",
        lambda: create_default_local_load_plan(states, Metadata(state_dict_metadata={})),
    )
    mixed = torch.nn.Sequential(torch.nn.Linear(2, 2, dtype=torch.bfloat16), torch.nn.LayerNorm(2))
    provoke("FSDP expects uniform original parameter dtype", lambda: fully_shard(mixed)(torch.zeros(2, 2)))
    return raised


def test_every_message_exists(of_libraries):
    ours = [text for path in (ROOT / "hf_lowprec").rglob("*.py") for text in texts(ast.parse(path.read_text("utf-8")))]
    messages = quoted()
    assert len(messages) > 20
    for message in messages:
        among = [of_libraries[message]] if message in of_libraries else ours
        assert any(map(pattern(message).search, among)), f"no message of the package reads {message!r}"


def test_a_message_that_has_gone_is_found():
    tree = ast.parse('raise ValueError(f"the old {name} is no " "more")')
    assert pattern("the old … is no more").search(texts(tree)[0])
    assert not pattern("the new … is no more").search(texts(tree)[0])
