"""Fine-tune an image classifier in pure BF16; images may come in FP32.

    python examples/vision.py --model google/vit-base-patch16-224-in21k --dataset ethz/food101 --output_dir out
    python examples/vision.py --smoke

The dataset has the columns `image` and `label`. Every field of `TrainingArguments` is an option.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import smoke
from datasets import load_dataset
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

import hf_lowprec  # noqa: F401  (registers the optimizer names)


@dataclass
class Options:
    model: str = field(default="google/vit-base-patch16-224-in21k", metadata={"help": "hub name or folder"})
    dataset: str = field(default="ethz/food101", metadata={"help": "with the columns image and label"})
    smoke: bool = field(default=False, metadata={"help": "train a tiny model on generated data, within a minute"})


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def main() -> None:
    parser = HfArgumentParser((TrainingArguments, Options))
    parser.set_defaults(
        eval_on_start=True, optim="adamw_bf16_split", learning_rate=5e-5, warmup_steps=10, logging_steps=10
    )
    parser.set_defaults(remove_unused_columns=False)  # `image` is what the transform reads
    if "--smoke" in sys.argv:
        parser.set_defaults(**smoke.ARGUMENTS)
    args, options = parser.parse_args_into_dataclasses()

    if options.smoke:
        options.model, options.dataset = smoke.vision(args.output_dir), smoke.images(args.output_dir)

    data = load_dataset(options.dataset, split="train")
    labels = data.features["label"].num_classes
    processor = AutoImageProcessor.from_pretrained(options.model)
    model = AutoModelForImageClassification.from_pretrained(options.model, num_labels=labels)

    def prepare(rows: dict[str, Any]) -> dict[str, Any]:
        pixels = processor([image.convert("RGB") for image in rows["image"]], return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, "labels": rows["label"]}

    data = data.with_transform(prepare).train_test_split(0.1, seed=args.seed)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=processor,
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.evaluate()
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    before, after = evaluations[0], evaluations[-1]
    trainer.accelerator.print(f"validation loss {before['eval_loss']:.4f} -> {after['eval_loss']:.4f}")
    trainer.accelerator.print(f"accuracy {before['eval_accuracy']:.1%} -> {after['eval_accuracy']:.1%}")
    trainer.save_model()


if __name__ == "__main__":
    main()
