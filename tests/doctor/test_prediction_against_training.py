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
    TrainerCallback,
)

from hf_lowprec.integrations.checkpoint_files.stored_tensors import open_weights
from hf_lowprec.tools.prediction import count_weights, plan_run, predict_rounding
from tests.support.training.tiny_trainer import arguments, optimizer_of

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


class Measured(TrainerCallback):
    """The lost updates of each `INTERVAL`th step of torch's AdamW without weight decay, by its formula."""

    def __init__(self) -> None:
        self.lost: dict[int, float] = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.before = {param: param.detach().double() for param in model.parameters()}

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        updates, changes = [], []
        for group in optimizer.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                moments = optimizer.state[param]
                step = float(moments["step"])
                root = (moments["exp_avg_sq"].double() / (1 - beta2**step)).sqrt()
                updates.append(-group["lr"] * moments["exp_avg"].double() / (1 - beta1**step) / (root + group["eps"]))
                changes.append(param.detach().double() - self.before[param])
        update, change = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (updates, changes))
        if (state.global_step + 1) % INTERVAL == 0:
            self.lost[state.global_step + 1] = float(1 - (update @ change) / (update @ update))


def train(tmp_path, kind, model, callbacks=(), **settings) -> Trainer:
    options = {"per_device_train_batch_size": 4, "logging_steps": INTERVAL, **settings}
    trainer = Trainer(model, arguments(tmp_path, **options), train_dataset=data(kind), callbacks=[*callbacks])
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


def load(kind: str, folder) -> transformers.PreTrainedModel:
    cls = AutoModelForCausalLM if kind == "llama" else AutoModelForSequenceClassification
    return cls.from_pretrained(folder, dtype=torch.float32)


def foretell(folder, optim: str, scheduler: str = "linear") -> list[float]:
    """The lost updates of each step."""
    run = plan_run(optim, LEARNING_RATE, STEPS, scheduler)
    found = predict_rounding(count_weights(open_weights(folder)), run)["nearest"]
    return (1 - found.stored / found.square).nan_to_num(nan=0.0).tolist()


def logged(trainer) -> dict[int, float]:
    return {entry["step"]: entry["lost_updates"] for entry in trainer.state.log_history if "loss" in entry}


def assert_foretold(prediction: list[float], lost: dict[int, float]) -> None:
    """The first logged step with half of the updates lost is the predicted one or a neighbor of it."""
    expected = next(step for step, share in enumerate(prediction, 1) if share >= 0.5)
    found = next(step for step, share in lost.items() if share >= 0.5)
    assert STEPS / 3 < expected < STEPS
    assert abs(found - -(-expected // INTERVAL) * INTERVAL) <= INTERVAL, (expected, lost)


@pytest.mark.combinations(1)
@pytest.mark.parametrize("scheduler", [pytest.param("linear", marks=pytest.mark.every_case), "cosine"])
@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.every_case), "bert"])
def test_a_run_logs_the_foretold_step(tmp_path, pretrained, kind, scheduler):
    settings = {"optim": "adamw_bf16_kahan", "optim_args": "rounding=nearest"}
    trainer = train(
        tmp_path,
        kind,
        load(kind, pretrained(kind)),
        learning_rate=LEARNING_RATE,
        max_steps=STEPS,
        lr_scheduler_type=scheduler,
        seed=1,
        **settings,
    )
    assert_foretold(foretell(pretrained(kind), "adamw_bf16_kahan", scheduler), logged(trainer))


@pytest.mark.every_case
def test_torchs_adamw_in_bf16(tmp_path, pretrained):
    model = load("llama", pretrained("llama")).to(torch.bfloat16)
    measured = Measured()
    settings = {"learning_rate": LEARNING_RATE, "max_steps": STEPS, "optim": "adamw_torch", "seed": 1}
    trainer = train(tmp_path, "llama", model, [measured], **settings)
    assert type(optimizer_of(trainer)) is torch.optim.AdamW
    assert_foretold(foretell(pretrained("llama"), "adamw_torch"), measured.lost)
