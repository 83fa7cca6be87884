"""The stock Trainer on a model that transformers has sharded over a device mesh while loading it."""
import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from accelerate.utils import ParallelismConfig
from transformers import AutoModelForCausalLM, DistributedConfig, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

import hf_lowprec
from tests.support.processes.gathered import gathered
from tests.support.processes.ranks import leave

torch._C._get_accelerator = lambda *a: torch.device("cpu")
ParallelismConfig._validate_accelerator = lambda *a: None

def build(kind):
    torch.manual_seed(0)
    size = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**size))
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**size, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8, decoder_sparse_step=1))

def data(rows=64):
    start = torch.randint(0, 64, (rows, 1), generator=torch.Generator().manual_seed(1))
    tokens = (start + torch.arange(16)) % 64
    return [{"input_ids": row, "labels": row} for row in tokens]

def main(kind, folder, config, *words):
    cfg = json.loads(config)
    if cfg:
        dist.init_process_group("gloo")
    path = f"{folder}/{kind}"
    if int(os.environ.get("RANK", 0)) == 0 and not os.path.exists(path):
        build(kind).save_pretrained(path)
    if cfg: dist.barrier()
    kw = dict(distributed_config=DistributedConfig(**cfg)) if cfg else {}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **kw)
    opts = dict(w.split("=") for w in words)
    args = TrainingArguments(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to=[], max_steps=6, learning_rate=1e-2, per_device_train_batch_size=int(opts.get("bs", 4)),
        gradient_accumulation_steps=int(opts.get("ga",1)),
        save_strategy="no", optim=opts.get("optim", "adamw_bf16_split"), optim_args=opts.get("args"), logging_steps=1, disable_tqdm=True, weight_decay=0.1)
    trainer = Trainer(model, args, train_dataset=data())
    trainer.train()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print([round(e["loss"], 5) for e in trainer.state.log_history if "loss" in e])
        print([round(e["grad_norm"], 5) for e in trainer.state.log_history if "grad_norm" in e])
        for n, p in list(model.named_parameters())[:8]:
            print(n, p.dtype, getattr(p, "placements", None), getattr(p, "device_mesh", None))
    leave()

main(*sys.argv[1:])
