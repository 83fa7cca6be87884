"""torchtitan: its optimizer container on a cast model, and the container's checkpoint."""

import copy
from dataclasses import dataclass

import torch
from host_steps import Steps
from tiny_trainer import counting_data, llama
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

import hf_lowprec


class LowPrecisionOptimizers(OptimizersContainer):
    """As in docs/guides/hosts.md."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name):
        return getattr(hf_lowprec, name)

    @staticmethod
    def _build_impl_kwargs(config):
        return {}


def container(model):
    kwargs = {"lr": 1e-6, "betas": (0.9, 0.95), "weight_decay": 0.1, "rounding": "split"}
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=kwargs)
    return LowPrecisionOptimizers.Config(param_groups=[group]).build(model_parts=[model])


def train(model, optimizers, steps):
    batch = torch.stack([row["input_ids"] for row in counting_data(8)])
    for _ in range(steps):
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        optimizers.zero_grad()


model = llama()
hf_lowprec.cast_model(model, torch.bfloat16)
optimizers = container(model)
watched = Steps()
train(model, optimizers, 2)
saved, weights = copy.deepcopy(optimizers.state_dict()), copy.deepcopy(model.state_dict())
train(model, optimizers, 2)
watched.check(4, lr=1e-6, rounding="split", betas=(0.9, 0.95), weight_decay=0.1)

resumed = llama()
hf_lowprec.cast_model(resumed, torch.bfloat16)
resumed.load_state_dict(weights)
optimizers = container(resumed)
optimizers.load_state_dict(saved)
train(resumed, optimizers, 2)
for name, weight in model.state_dict().items():
    assert torch.equal(weight, resumed.state_dict()[name]), name
