"""Print the names that ZeRO optimizers around torch's AdamW have, their state dicts, and parameters under ZeRO 3."""

import json
import os

import deepspeed
import torch

from tests.support.processes import deepspeed_on_cpu  # noqa: F401
from tests.support.processes.worlds import run_worlds


def show() -> None:
    os.environ["LOCAL_RANK"] = "0"
    names = {}
    for stage in (2, 3):
        model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        }
        optimizer = torch.optim.AdamW(model.parameters())
        zero = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[1]
        names |= {f"zero {stage}": dir(zero), f"state dict {stage}": [*zero.state_dict()]}
    print(json.dumps({**names, "parameter": dir(model.weight)}), flush=True)


if __name__ == "__main__":
    run_worlds(show, [1])
