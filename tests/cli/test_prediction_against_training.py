"""The prediction foretells at which step of a real run half of the updates are lost."""

import inspect
import json
import textwrap

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
)

from hf_lowprec.integrations.checkpoint_files.stored_tensors import open_weights
from hf_lowprec.tools.prediction import count_weights, plan_run, predict_rounding
from tests.support.training.tiny_trainer import arguments

LENGTH, STEPS, INTERVAL = 32, 120, 6
LEARNING_RATE = 5e-4
"""Half of the updates is lost where a weight of 0.02 is 3.8 · 0.23 times the learning rate from the next number, at
about 1.4e-4: in the second half of the run, so that one interval is some percent of the learning rate."""


def text() -> bytes:
    return "".join(inspect.getsource(module) for module in (inspect, json.decoder, textwrap)).encode()


def tokens() -> tuple[torch.Tensor, int, int]:
    """The text as numbers, how many there are, and that of a space. Bytes that do not occur get none: the row of a head
    that no gradient but the softmax's reaches is pushed in one direction all the time."""
    occurring = sorted(set(text()))
    numbers = {byte: number for number, byte in enumerate(occurring)}
    return torch.tensor([numbers[byte] for byte in text()]), len(occurring), numbers[ord(" ")]


def data(kind: str) -> list[dict]:
    """Blocks of text, to predict the next byte of, or whether there are many spaces in it.

    One answer in five about the spaces is wrong. If all were right, the model would soon know them; gradients would
    shrink within a few steps, which the prediction does not foresee (see `noise_directions`).
    """
    generator = torch.Generator().manual_seed(0)
    every, _, space = tokens()
    starts = torch.randint(0, len(every) - LENGTH, (1024,), generator=generator)
    blocks = [every[start : start + LENGTH] for start in starts.tolist()]
    if kind == "llama":
        return [{"input_ids": block, "labels": block} for block in blocks]
    wrong = (torch.rand(len(blocks), generator=generator) < 0.2).tolist()
    return [
        {"input_ids": block, "labels": int(((block == space).sum() > 8) ^ is_wrong)}
        for block, is_wrong in zip(blocks, wrong, strict=True)
    ]


def new_model(kind: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": tokens()[1], "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": LENGTH}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
    return BertForSequenceClassification(BertConfig(**sizes, num_labels=2))


def train(tmp_path, kind, model, **settings) -> Trainer:
    options = {"per_device_train_batch_size": 4, "logging_steps": INTERVAL, **settings}
    trainer = Trainer(model, arguments(tmp_path, **options), train_dataset=data(kind))
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """The folder of a model that was trained in FP32, so that the gradients of the run are no longer all alike."""
    folders = {}

    def pretrain(kind: str):
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            model = new_model(kind)
            train(folders[kind], kind, model, learning_rate=2e-3, max_steps=150, optim="adamw_torch")
            model.save_pretrained(folders[kind])
        return folders[kind]

    return pretrain


@pytest.mark.combinations(1)
@pytest.mark.parametrize("scheduler", [pytest.param("linear", marks=pytest.mark.every_case), "cosine"])
@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.every_case), "bert"])
def test_a_run_logs_the_foretold_step(tmp_path, pretrained, kind, scheduler):
    """The first logged step with half of the updates lost is the predicted one or a neighbor of it."""
    run = plan_run("adamw_bf16_kahan", LEARNING_RATE, STEPS, scheduler)
    found = predict_rounding(count_weights(open_weights(pretrained(kind))), run)["nearest"]
    shares = (1 - found.stored / found.square).nan_to_num(nan=0.0).tolist()
    foretold = next(step for step, share in enumerate(shares, 1) if share >= 0.5)
    assert STEPS / 3 < foretold < STEPS

    settings = {"optim": "adamw_bf16_kahan", "optim_args": "rounding=nearest", "lr_scheduler_type": scheduler}
    cls = AutoModelForCausalLM if kind == "llama" else AutoModelForSequenceClassification
    model = cls.from_pretrained(pretrained(kind), dtype=torch.float32)
    trainer = train(tmp_path, kind, model, learning_rate=LEARNING_RATE, max_steps=STEPS, seed=1, **settings)
    lost = {entry["step"]: entry["lost_updates"] for entry in trainer.state.log_history if "loss" in entry}
    measured = next(step for step, share in lost.items() if share >= 0.5)
    assert abs(measured - -(-foretold // INTERVAL) * INTERVAL) <= INTERVAL, (foretold, lost)
