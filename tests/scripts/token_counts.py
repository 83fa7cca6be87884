"""One step of the stock Trainer over a number of tokens, on however many ranks there are.

token_counts.py OUT TOKENS MICRO_BATCHES OPTIM: rank 0 writes the logged loss and the gradients to OUT. Ranks and
micro-batches share the same sequences, whatever their numbers.
"""

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

import hf_lowprec  # noqa: F401
from tests.support.processes.ranks import leave
from tests.support.training.tiny_trainer import arguments

LENGTH = 65  # 64 of them are predicted


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **size))


def sequences(tokens: int) -> list[dict[str, torch.Tensor]]:
    """Four micro-batches of one length, of which `tokens` labels are not ignored: the first ones."""
    rows = 4 * -(-tokens // (4 * (LENGTH - 1)))
    inputs = torch.randint(0, 64, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = inputs.clone()
    ignored = torch.arange(rows * (LENGTH - 1)).view(rows, -1) >= tokens
    labels[:, 1:] = labels[:, 1:].masked_fill(ignored, -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(inputs, labels, strict=True)]


class Gradients(TrainerCallback):
    """Keeps the gradients of the step, before it is taken."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.found = {name: p.grad.detach().float().clone() for name, p in model.named_parameters()}


def stepped(tokens: int, micro_batches: int, optim: str, ranks: int = 1) -> tuple[float, dict[str, torch.Tensor]]:
    """The logged loss and the gradients of one step."""
    data, gradients = sequences(tokens), Gradients()
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(
            folder,
            optim=optim,
            max_steps=1,
            per_device_train_batch_size=len(data) // (micro_batches * ranks),
            gradient_accumulation_steps=micro_batches,
            max_grad_norm=0,
            logging_steps=1,
        )
        trainer = Trainer(llama(), args, train_dataset=data, callbacks=[gradients])
        trainer.train()
    (loss,) = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return loss, gradients.found


def main(out: str, tokens: str, micro_batches: str, optim: str) -> None:
    dist.init_process_group("gloo")
    step = stepped(int(tokens), int(micro_batches), optim, dist.get_world_size())
    if dist.get_rank() == 0:
        torch.save(step, out)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
