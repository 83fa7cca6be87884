"""A loss module around the model, as sentence-transformers has it: layers of its own, a second model, a queue."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from transformers import Trainer

import hf_lowprec  # noqa: F401
from tests.support.training.tiny_trainer import VOCABULARY, assert_follows, llama, trained

OURS = "adamw_bf16_split"


class DistillationLoss(nn.Module):
    def __init__(self, model, teacher):
        super().__init__()
        self.model, self.teacher = model, teacher
        self.head = nn.Sequential(nn.Linear(VOCABULARY, 16), nn.LayerNorm(16), nn.Linear(16, VOCABULARY))
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("queue", torch.randn(4, VOCABULARY))

    def forward(self, tokens):
        logits, taught = self.model(tokens).logits, self.teacher(tokens).logits
        assert {logits.dtype, taught.dtype} == {torch.float32}
        scores = self.head(logits) * self.log_scale.exp() + taught @ self.queue.T @ self.queue / VOCABULARY
        return cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) + mse_loss(logits, taught)


class LossTrainer(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        torch.manual_seed(5)
        self.loss = DistillationLoss(self.model, llama(seed=6))

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return self.loss(inputs["input_ids"])

    def get_optimizer_cls_and_kwargs(self, args, model=None):
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, self.loss)
        return cls, kwargs | {"params": self.loss.parameters()}


def test_only_models_in_a_loss_are_cast(tmp_path):
    settings = {"trainer_cls": LossTrainer, "learning_rate": 1e-3, "max_steps": 6, "logging_steps": 2}
    reference = trained(tmp_path, optim="adamw_torch", **settings)
    args = "keep_fp32=head.0|model.model.layers.0.mlp.up_proj|teacher.lm_head"
    with pytest.raises(ValueError, match=r"too late for .*model\.layers\.0\.mlp"):
        trained(tmp_path, optim=OURS, optim_args=args, **settings)
    with pytest.raises(ValueError, match=r"'head\.9' matches no module or tensor; similar names: .*head\.0"):
        trained(tmp_path, optim=OURS, optim_args="keep_fp32=head.9", **settings)
    args = "keep_fp32=head.0|model.layers.0.mlp.up_proj|teacher.lm_head"
    trainer = trained(tmp_path, optim=OURS, optim_args=args, **settings)
    assert_follows(trainer, reference)
    for name, tensor in (*trainer.loss.named_parameters(), *trainer.loss.named_buffers()):
        kept = any(part in name for part in ("norm", "inv_freq", "layers.0.mlp.up_proj", "teacher.lm_head"))
        exact = not name.startswith(("model.", "teacher.")) or kept
        assert tensor.dtype == (torch.float32 if exact else torch.bfloat16), name
