"""A stock training script: it knows transformers and nothing else."""

import hashlib
import sys
from dataclasses import dataclass

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


@dataclass
class ScriptArguments:
    resume: bool = False


def main() -> None:
    parser = HfArgumentParser((TrainingArguments, ScriptArguments))
    args, script = parser.parse_args_into_dataclasses(sys.argv[1:])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.1,  # so that resuming needs the RNG state as well
    )
    model = LlamaForCausalLM(config)
    tokens = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=script.resume or None)
    digest = hashlib.sha256()
    for _, tensor in sorted(trainer.model.state_dict().items()):
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    print(f"steps={trainer.state.global_step} dtype={model.dtype} weights={digest.hexdigest()}")


if __name__ == "__main__":
    main()
