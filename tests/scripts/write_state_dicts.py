"""Write state dicts of every algorithm and mode, and the weights after further steps, as JSON.

`tests/optim/state_dicts_format_1.json` was written by the last commit whose state dicts have no header:

    git worktree add /tmp/format_1 9f6cfdf
    PYTHONPATH=/tmp/format_1 python tests/scripts/write_state_dicts.py > tests/optim/state_dicts_format_1.json
"""

import json

import torch

from hf_lowprec.optim.algorithms import ALGORITHMS
from hf_lowprec.rounding import MODES

OPTIONS = {"SGD": {"momentum": 0.9}, "AdamW": {"amsgrad": True}}
FIRST, FURTHER = range(3), range(3, 6)


def build(algorithm: str, mode: str, weight: torch.Tensor) -> torch.optim.Optimizer:
    return ALGORITHMS[algorithm]([torch.nn.Parameter(weight)], lr=0.01, rounding=mode, **OPTIONS.get(algorithm, {}))


def train(optimizer: torch.optim.Optimizer, steps: range) -> torch.Tensor:
    (param,) = optimizer.param_groups[0]["params"]
    for step in steps:
        param.grad = torch.tensor([[0.3, -1.2], [0.01, 2.0]], dtype=param.dtype).roll(step)
        optimizer.step()
    return param.detach()


def main() -> None:
    found = {}
    for name in sorted(ALGORITHMS):
        for mode in sorted(MODES):
            optimizer = build(name, mode, torch.tensor([[0.5, -1.0], [0.02, 3.0]], dtype=torch.bfloat16))
            weight = train(optimizer, FIRST).tolist()
            saved = optimizer.state_dict()
            state = {key: (value.tolist(), str(value.dtype)) for key, value in saved["state"][0].items()}
            further = train(optimizer, FURTHER).tolist()
            found[f"{name} {mode}"] = {
                "weight": weight,
                "param_groups": saved["param_groups"],
                "state": state,
                "weight after further steps": further,
            }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    print(f"{{\n{lines}\n}}")


if __name__ == "__main__":
    main()
