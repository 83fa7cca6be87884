"""A tiny Llama, data that it learns within a few steps, and a Trainer that has trained on them."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY, LENGTH = 64, 16
LOAD_BEST = {
    "eval_strategy": "steps",
    "save_strategy": "steps",
    "eval_steps": 4,
    "save_steps": 4,
    "load_best_model_at_end": True,
}
"""Training arguments that evaluate and save every four steps, and load the best weights at the end."""


def llama(seed: int = 0) -> LlamaForCausalLM:
    """An FP32 model; equal seeds give equal weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


def counting_data(rows: int = 64) -> list[dict[str, torch.Tensor]]:
    """Sequences that count upwards: learnable within a few steps."""
    start = torch.randint(0, VOCABULARY, (rows, 1), generator=torch.Generator().manual_seed(1))
    tokens = (start + torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


def arguments(tmp_path, cls=TrainingArguments, **settings):
    defaults = {
        "output_dir": str(tmp_path),
        "learning_rate": 1e-2,
        "max_steps": 12,
        "per_device_train_batch_size": 8,
        "logging_steps": 4,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return cls(**{**defaults, **settings})


def trained(tmp_path, model=None, trainer_cls=Trainer, resume=None, **settings):
    options = {
        key: settings.pop(key)
        for key in ("callbacks", "model_init", "processing_class", "optimizer_cls_and_kwargs")
        if key in settings
    }
    model = None if "model_init" in options else (model or llama())
    args = arguments(tmp_path, **settings)
    trainer = trainer_cls(
        model=model, args=args, train_dataset=counting_data(), eval_dataset=counting_data(16), **options
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def is_precision(name: str) -> bool:
    """Whether `LowPrecisionCallback` adds a number of that name to the logs."""
    return name.startswith("lost_") or name == "norms_never_moved"


def logged(trainer, key: str) -> list:
    """The values of `key` in the logs."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def losses(trainer) -> list[float]:
    """The logged training losses."""
    return logged(trainer, "loss")


def assert_same_weights(trainer, reference) -> None:
    """Assert that two models have the same parameters, bit for bit."""
    for (name, ours), theirs in zip(trainer.model.named_parameters(), reference.model.parameters(), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name


def assert_same(trainer, reference) -> None:
    """Assert that two models have the same parameters, and their optimizers the same states, bit for bit."""
    assert_same_weights(trainer, reference)
    states = (optimizer_of(one).state.values() for one in (trainer, reference))
    for ours, theirs in zip(*states, strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def assert_follows(trainer, reference, share: float = 0.005) -> None:
    """Assert equal numbers of trainable parameters, the same keys in both logs, and losses within rounding noise.

    BF16 activations carry a relative error of 2^-9 per operation, √10 · 2^-9 = 0.6% of a logit of size one after ten; a
    loss is the mean over some hundred tokens, most of whose errors cancel.
    """
    count, expected = (sum(p.numel() for p in t.model.parameters() if p.requires_grad) for t in (trainer, reference))
    assert count == expected
    ours, theirs = ([e for e in t.state.log_history if "loss" in e] for t in (trainer, reference))
    assert [{name for name in e if not is_precision(name)} for e in ours] == [set(e) for e in theirs] != []
    assert all("lost_updates" in entry for entry in ours)
    bound = share * abs(theirs[0]["loss"])
    found = [abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True)]
    assert max(found) < bound, (losses(trainer), losses(reference))


def optimizer_of(trainer) -> torch.optim.Optimizer:
    """The optimizer inside of accelerate's wrapper, if there is one."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def assert_pure_bf16(model: nn.Module) -> None:
    """Assert that norms are FP32 and all other parameters BF16."""
    for name, parameter in model.named_parameters():
        expected = torch.float32 if "norm" in name else torch.bfloat16
        assert parameter.dtype == expected, name
