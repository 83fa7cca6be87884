"""axolotl: its `train` command on a YAML file."""

import yaml

SETTINGS = {
    "plugins": ["hf_lowprec.integrations.axolotl.Plugin"],
    "optimizer": "adamw_bf16_split",
    "optim_args": {"betas": "0.9|0.95"},
    "base_model": "model",
    "bf16": False,
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "sequence_len": 32,
    "max_steps": 3,
    "lr_scheduler": "constant",
    "dataset_num_proc": 1,
    "special_tokens": {"pad_token": "<pad>"},
}

if __name__ == "__main__":  # axolotl starts processes that import this file
    from axolotl.cli.train import do_cli
    from host_steps import Steps, saved_model, saved_rows, texts

    saved_model("model")
    datasets = [{"path": saved_rows(texts(), "texts.jsonl"), "ds_type": "json", "type": "completion"}]

    def trained(name: str, count: int, lr: float, **settings: object) -> set[float]:
        """Train as `axolotl train NAME.yaml` does, and check the optimizer; return its learning rates."""
        steps = Steps()
        settings = {**SETTINGS, "datasets": datasets, "learning_rate": lr, "output_dir": f"{name}-out", **settings}
        with open(f"{name}.yaml", "w") as file:
            yaml.safe_dump(settings, file)
        do_cli(f"{name}.yaml")
        steps.check(count, lr=lr, rounding="split", betas=(0.9, 0.95))
        return {group["lr"] for group in steps.optimizer.param_groups}

    trained("sft", 3, 1e-5, save_steps=2)
    trained("resumed", 2, 1e-5, output_dir="sft-out", max_steps=4, resume_from_checkpoint="sft-out/checkpoint-2")
    assert trained("rates", 3, 1e-5, embedding_lr=1e-6) == {1e-5, 1e-6}
