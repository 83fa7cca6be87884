"""TRL: `SFTTrainer` and `DPOTrainer`, with `optim=` in their configs."""

from datasets import Dataset
from host_steps import Steps, answers, saved_model, texts
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import hf_lowprec  # noqa: F401  (registers the optimizer names)

COMMON = {"optim": "adamw_bf16_split", "per_device_train_batch_size": 8, "use_cpu": True, "report_to": "none"}
COMMON |= {"disable_tqdm": True, "logging_steps": 1, "save_steps": 2}

model = saved_model()


def sft(steps: int, resume: bool = False) -> None:
    args = SFTConfig(output_dir="sft", max_steps=steps, learning_rate=1e-5, optim_args="betas=0.9|0.95", **COMMON)
    trainer = SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(texts()))
    trainer.train(resume_from_checkpoint=resume)


steps = Steps()
sft(4)
steps.check(4, lr=1e-5, rounding="split", betas=(0.9, 0.95))
steps = Steps()
sft(6, resume=True)
steps.check(2, lr=1e-5, rounding="split")

steps = Steps()
args = DPOConfig(output_dir="dpo", max_steps=4, learning_rate=1e-6, **COMMON)
DPOTrainer(model=model, args=args, train_dataset=Dataset.from_list(answers())).train()
steps.check(4, lr=1e-6, rounding="split")
