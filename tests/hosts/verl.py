"""verl: its sharding, optimizer builder, clipping and offloading, as its FSDP engine calls them on a GPU."""

import torch
import torch.distributed as dist
from host_steps import Steps, saved_model
from tiny_trainer import counting_data
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM
from verl.utils import fsdp_utils
from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer

fsdp_utils.get_device_id = lambda: "cpu"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
model = AutoModelForCausalLM.from_pretrained(saved_model(), dtype=torch.bfloat16)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
fsdp_utils.apply_fsdp2(model, {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": True}, {})
config = FSDPOptimizerConfig(
    optimizer_impl="hf_lowprec",
    optimizer="AdamW",
    lr=1e-6,
    weight_decay=0.01,
    override_optimizer_config={"rounding": "split", "state_dtype": {"exp_avg_sq": torch.float32}},
)
optimizer = build_optimizer(model.parameters(), config)
watched = Steps()
batch = torch.stack([row["input_ids"] for row in counting_data(8)])
for _ in range(4):
    model(input_ids=batch, labels=batch).loss.backward()
    fsdp_utils.load_fsdp_optimizer(optimizer, "cpu")
    fsdp_utils.fsdp2_clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    fsdp_utils.offload_fsdp_optimizer(optimizer)
watched.check(4, lr=1e-6, rounding="split", weight_decay=0.01, betas=config.betas)
dist.barrier()
dist.destroy_process_group()
