"""LLaMA-Factory: its training program on a YAML file, started by `hf-lowprec run`."""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import yaml
from host_steps import Steps, answers, saved_model, saved_rows

from hf_lowprec.__main__ import main

# Imported for audio alone; the build on PyPI needs the libraries of CUDA.
sys.modules["torchaudio"] = ModuleType("torchaudio")
sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)

SETTINGS = {
    "optim": "adamw_bf16_split",
    "optim_args": "betas=0.9|0.95",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "model_name_or_path": saved_model(),
    "template": "empty",
    "dataset_dir": ".",
    "dataset": "rows",
    "cutoff_len": 32,
    "max_steps": 3,
    "per_device_train_batch_size": 8,
    "lr_scheduler_type": "constant",
    "save_steps": 2,
    "report_to": "none",
    "use_cpu": True,
}


def trained(file: str, lr: float, steps: int = 3, **settings: object) -> None:
    """Train as `hf-lowprec run -m llamafactory.launcher FILE` does, and check the optimizer."""
    watched = Steps()
    Path(file).write_text(yaml.safe_dump({**SETTINGS, "learning_rate": lr, "output_dir": file + "-out", **settings}))
    sys.argv = ["hf-lowprec", "run", "-m", "llamafactory.launcher", file]
    try:
        main()
    except SystemExit as end:
        assert not end.code
    watched.check(steps, lr=lr, rounding="split", betas=(0.9, 0.95))


saved_rows(answers(), "rows.jsonl")
columns = {"prompt": "prompt", "response": "chosen"}
ranked = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
rows = {"file_name": "rows.jsonl", "columns": columns}
pairs = {"file_name": "rows.jsonl", "columns": ranked, "ranking": True}
Path("dataset_info.json").write_text(json.dumps({"rows": rows, "pairs": pairs}))
trained("sft.yaml", 1e-5, bf16=True)
trained(
    "resumed.yaml", 1e-5, 2, output_dir="sft.yaml-out", max_steps=5, resume_from_checkpoint="sft.yaml-out/checkpoint-3"
)
trained("fp32.yaml", 1e-6, infer_dtype="float32")
trained("dpo.yaml", 1e-6, stage="dpo", dataset="pairs", bf16=True)
