"""NeMo Automodel: the `optimizer` section of a recipe's YAML file, as the recipe reads it and builds from it."""

from pathlib import Path

import torch
from host_steps import Steps, saved_model
from nemo_automodel.components.config.loader import load_yaml_config
from nemo_automodel.components.optim.optimizer import _factory_accepts_foreach
from nemo_automodel.recipes._typed_config import RecipeConfig
from tiny_trainer import counting_data
from transformers import AutoModelForCausalLM

import hf_lowprec

Path("recipe.yaml").write_text("""
optimizer:
  _target_: hf_lowprec.AdamW
  lr: 1.0e-6
  weight_decay: 0.1
  betas: [0.9, 0.95]
  rounding: split
""")
assert not _factory_accepts_foreach(hf_lowprec.AdamW)  # it would be passed under tensor parallelism
model = AutoModelForCausalLM.from_pretrained(saved_model(), dtype=torch.bfloat16)  # NeMo's own class needs a GPU
recipe = RecipeConfig(load_yaml_config("recipe.yaml"))
(optimizer,) = recipe.optimizer.build(model)
watched = Steps()
batch = torch.stack([row["input_ids"] for row in counting_data(8)])
for _ in range(4):
    model(input_ids=batch, labels=batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
watched.check(4, lr=1e-6, rounding="split", weight_decay=0.1)
