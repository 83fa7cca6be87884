"""Other trainers than the stock one, subclasses that build their own optimizer, and no trainer at all."""

import re

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import (
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

import hf_lowprec
from tests.support.training.tiny_trainer import (
    VOCABULARY,
    arguments,
    assert_follows,
    assert_pure_bf16,
    counting_data,
    llama,
    optimizer_of,
    trained,
)


def test_seq2seq_generates_between_steps(tmp_path):
    def run(optim):
        torch.manual_seed(0)
        size = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
        config = T5Config(**size, vocab_size=VOCABULARY, decoder_start_token_id=0)
        counts = []
        trainer = Seq2SeqTrainer(
            model=T5ForConditionalGeneration(config),
            args=arguments(
                tmp_path,
                cls=Seq2SeqTrainingArguments,
                optim=optim,
                learning_rate=3e-3,
                predict_with_generate=True,
                generation_config=GenerationConfig(max_new_tokens=4, decoder_start_token_id=0),
                eval_strategy="steps",
                eval_steps=6,
            ),
            train_dataset=counting_data(),
            eval_dataset=counting_data(16),
            compute_metrics=lambda found: {"evaluations": float(counts.append(len(found.predictions)) or len(counts))},
        )
        trainer.train()
        assert counts == [16, 16]
        return trainer

    reference = run("adamw_torch")
    evaluated = [e for e in reference.state.log_history if "eval_loss" in e]
    trainer = run("adamw_bf16_kahan")
    assert_follows(trainer, reference)
    found = [e for e in trainer.state.log_history if "eval_loss" in e]
    assert [set(e) for e in found] == [set(e) for e in evaluated]
    assert found[-1]["eval_loss"] == pytest.approx(evaluated[-1]["eval_loss"], rel=0.005)


class Halved(Trainer):
    """The head learns at half the rate; how the optimizer is built is up to subclasses."""

    def groups(self):
        named = list(self.model.named_parameters())
        head = [p for name, p in named if "lm_head" in name]
        return [{"params": [p for name, p in named if "lm_head" not in name]}, {"params": head, "lr": 5e-3}]


class AsksTrainer(Halved):
    def create_optimizer(self, model=None):
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(self.args)
        self.optimizer = cls(self.groups(), **kwargs)
        return self.optimizer


class BuildsOurs(Halved):
    def create_optimizer(self, model=None):
        cls = torch.optim.AdamW if self.args.optim == "adamw_torch" else hf_lowprec.AdamW
        self.optimizer = cls(self.groups(), lr=1e-2, weight_decay=0.0)
        return self.optimizer


class AddsToSuper(Trainer):
    """A temperature of its own, FP32, beside the model's parameters."""

    def create_optimizer(self, *args, **kwargs):
        super().create_optimizer(*args, **kwargs)
        self.temperature = nn.Parameter(torch.ones(()))
        self.optimizer.add_param_group({"params": [self.temperature], "lr": 1e-1})
        return self.optimizer

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        assert logits.dtype == torch.float32
        loss = nn.functional.cross_entropy((logits * self.temperature)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, {"logits": logits}) if return_outputs else loss


@pytest.mark.parametrize("trainer_cls", [AsksTrainer, BuildsOurs, AddsToSuper])
def test_subclasses_with_their_own_optimizer_and_loss(tmp_path, trainer_cls):
    reference = trained(tmp_path, trainer_cls=trainer_cls, optim="adamw_torch")
    trainer = trained(tmp_path, trainer_cls=trainer_cls, optim="adamw_bf16_sr")
    assert isinstance(optimizer_of(trainer), hf_lowprec.AdamW)
    assert_pure_bf16(trainer.model)
    assert_follows(trainer, reference)
    groups = [[group["initial_lr"] for group in optimizer_of(t).param_groups] for t in (trainer, reference)]
    assert groups[0] == groups[1]
    if trainer_cls is AddsToSuper:
        assert trainer.temperature.item() == pytest.approx(reference.temperature.item(), rel=0.005)


class BuildsTorchs(Halved):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.AdamW(self.groups(), lr=1e-2)
        return self.optimizer


def test_an_optimizer_that_is_not_the_one_asked_for_is_refused(tmp_path):
    asked = r"optim='adamw_bf16_kahan' was requested, but AdamW from optimizers= or create_optimizer"
    with pytest.raises(ValueError, match=asked):
        trained(tmp_path, trainer_cls=BuildsTorchs, optim="adamw_bf16_kahan")
    model = llama()
    before = [parameter.detach().to(torch.bfloat16) for parameter in model.parameters()]
    trainer = Trainer(
        model=model,
        args=arguments(tmp_path, optim="adamw_bf16_kahan"),
        train_dataset=counting_data(),
        optimizers=(torch.optim.AdamW(model.parameters()), None),
    )
    with pytest.raises(ValueError, match=asked):
        trainer.train()
    assert all(torch.equal(p.to(torch.bfloat16), old) for p, old in zip(model.parameters(), before, strict=True))


def test_modules_of_galore_are_refused(tmp_path):
    with pytest.raises(ValueError, match=re.escape("optim_target_modules=['mlp'] selects modules for GaLore")):
        trained(tmp_path, optim="adamw_bf16_kahan", optim_target_modules=["mlp"])


def test_a_loop_with_accelerate_alone():
    def run(ours):
        torch.manual_seed(0)
        model, accelerator = llama(), Accelerator(cpu=True)
        if ours:
            hf_lowprec.cast_model(model)
            optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-2)
            hf_lowprec.prepare_accelerator(accelerator)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(counting_data(), batch_size=8)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        found = []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    ours, theirs = run(True), run(False)
    assert theirs[-1] < 0.8 * theirs[0]
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.005 * theirs[0]  # as in assert_follows
