"""Settings and optimizers that are not supported under DeepSpeed are refused, and nothing is changed then."""

import copy

import pytest
import torch

import hf_lowprec
from hf_lowprec.integrations.deepspeed.config import BF16_FLAGS, check_config, set_bf16_flags
from hf_lowprec.integrations.deepspeed.initialize import initialize_deepspeed
from hf_lowprec.optim import Adafactor, Prodigy, ScheduleFreeAdamW, StableAdamW
from hf_lowprec.rounding.attached_low_bits import attached_low_bits
from tests.support.models import tiny_models

ZERO = [
    ({"stage": 0}, "stage=0", "set 1, 2 or 3"),
    ({"offload_optimizer": {"device": "cpu"}}, "offload_optimizer.device='cpu'", "remove it"),
    ({"stage": 3, "offload_param": {"device": "nvme"}}, "offload_param.device='nvme'", "remove it"),
    ({"elastic_checkpoint": True}, "elastic_checkpoint=True", "remove it"),
    ({"compute_grad_norm": False}, "compute_grad_norm='false'", "remove it"),
    ({"contiguous_gradients": False}, "contiguous_gradients='false'", "remove it"),
    ({"stage": 3, "zero_quantized_gradients": True}, "zero_quantized_gradients=True", "remove it"),
    ({"stage": 3, "mics_shard_size": 4}, "mics_shard_size=4", "remove it"),
    ({"zenflow": {"topk_ratio": 0.1}}, "zenflow=", "remove it"),
]
CONFIGS = [
    ({"fp16": {"enabled": True}}, "fp16.enabled=True", "remove it"),
    ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled=True", "remove it"),
    ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size=2", "FSDP2"),
    ({"checkpoint": {"load_universal": True}}, "load_universal=True", "remove it"),
    ({"optimizer": {"type": "AdamW"}}, "optimizer={'type': 'AdamW'}", "remove it"),
    (
        {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
        "data_types.grad_accum_dtype='fp32'",
        "(grad_accumulation='fp32') needs stage 2 or 3",
    ),
]
EVERY = [({"zero_optimization": {"stage": 2, **zero}}, setting, way_out) for zero, setting, way_out in ZERO]
EVERY += [({"zero_optimization": {"stage": 2}, **config}, setting, way_out) for config, setting, way_out in CONFIGS]


def test_settings():
    for config, setting, way_out in EVERY:
        with pytest.raises(ValueError) as raised:
            check_config(config)
        assert setting in str(raised.value) and way_out in str(raised.value), config
    for stage in (1, 2, 3):
        none = {"device": "none"}
        check_config({"zero_optimization": {"stage": stage, "offload_optimizer": none, "overlap_comm": True}})


def test_flags_that_are_not_set_are_named():
    config = {"bf16": {"enabled": True}}
    assert set_bf16_flags(config) == [f"bf16.{name}" for name in BF16_FLAGS[1:]]
    assert config["bf16"] == dict.fromkeys(BF16_FLAGS, True) and config["zero_allow_untested_optimizer"]
    assert set_bf16_flags(config) == []


def stepped(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = hf_lowprec.SGD(params, lr=0.0, momentum=0.9)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return optimizer


REFUSED = {
    "StableAdamW": (StableAdamW, "StableAdamW takes means over whole tensors"),
    "ScheduleFreeAdamW": (ScheduleFreeAdamW, r"ScheduleFreeAdamW changes weights in eval\(\)"),
    "Prodigy": (Prodigy, "Prodigy takes means over whole tensors"),
    "factored": (lambda params: hf_lowprec.AdamW(params, factored=True), "use AdamW without factored=True"),
    "Adafactor": (Adafactor, "Adafactor takes means over whole tensors"),
    "gradient_release": (lambda params: hf_lowprec.AdamW(params, gradient_release=True), "gradient_release=True"),
    "states": (stepped, "SGD has states already; build a new one"),
    "config": (hf_lowprec.AdamW, "stage=0"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.combinations(1)
def test_what_is_refused_leaves_the_model_as_it_was(case):
    model, _ = tiny_models.llama()
    hf_lowprec.cast_model(model)
    make, message = REFUSED[case]
    optimizer = make(list(model.parameters()))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0 if case == "config" else 2}}
    given, hooks = copy.deepcopy(config), count_hooks(model)
    before = [(param, param.clone(), attached_low_bits(param)) for param in model.parameters()]
    with pytest.raises(ValueError, match=message):
        initialize_deepspeed(model, optimizer, config)
    assert config == given and count_hooks(model) == hooks
    for param, (same, weight, kept) in zip(model.parameters(), before, strict=True):
        assert param is same and torch.equal(param, weight) and attached_low_bits(param) is kept


def count_hooks(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
