"""Four faults of models that transformers shards while loading them (transformers 5.23, accelerate 1.15, torch 2.13).

torchrun --nproc-per-node 2 transformers_sharded_at_load.py

It needs neither a GPU nor this project, and prints what it finds.

1. `ReplicatedWithGradAllReduce` sums `param.grad` over the ranks in a hook that runs after each accumulation. From the
   second micro-batch on, `param.grad` has what was summed before, which is summed again. A hook on the gradient of the
   micro-batch (`param.register_hook`, returning its sum over the ranks) has no such fault.
2. `is_norm_and_head_pair` puts the final norm and the head into one group of FSDP2, which needs one dtype. A model
   whose class keeps norms in FP32 (`_keep_in_fp32_modules_strict`) cannot run. `_resolve_parallel_plans` gives modules
   kept in FP32 groups of their own, except those that the plan names; the pair should be split if its dtypes differ.
3. `Accelerator.prepare` with `ParallelismConfig(tp_size=…)` imports `ReplicateParallel`, which is gone from
   transformers 5.
4. After a forward pass without gradients, FSDP2 leaves the head gathered (`keep_full_weight`). `Trainer.evaluate()`
   before `Trainer.train()` gives the optimizer that tensor, and FSDP2 trains another one: no step changes the head.
"""

import importlib
import tempfile
from typing import ClassVar

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

SIZE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def loaded(model, **options):
    """`model` as `from_pretrained` loads it on all ranks."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    return type(model).from_pretrained(folder[0], **options)


def gradients_summed_again() -> str:
    torch.manual_seed(0)
    whole = Qwen3ForCausalLM(Qwen3Config(**SIZE, head_dim=8))
    parallel = loaded(whole, distributed_config=DistributedConfig(tp_size=2))
    for batch in torch.randint(0, 64, (3, 2, 8), generator=torch.Generator().manual_seed(1)):
        for model in (whole, parallel):
            (model(input_ids=batch, labels=batch).loss / 3).backward()
    name = "model.layers.0.self_attn.q_norm.weight"
    expected, found = (model.get_parameter(name).grad for model in (whole, parallel))
    error = float((found - expected).norm() / expected.norm())
    return f"after 3 micro-batches, the gradient of {name} is off by {error:.1e} of its norm"


def norm_and_head_in_one_group() -> str:
    class Llama(LlamaForCausalLM):
        _keep_in_fp32_modules_strict: ClassVar = ["norm"]

    torch.manual_seed(0)
    model = loaded(Llama(LlamaConfig(**SIZE)), dtype=torch.bfloat16, distributed_config=DistributedConfig(fsdp_size=2))
    try:
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    except (AssertionError, RuntimeError) as error:
        return f"the first forward pass of a model with norms kept in FP32 raises: {error}"
    return "a model with norms kept in FP32 runs"


def import_of_a_removed_name() -> str:
    module = importlib.import_module("transformers.integrations.tensor_parallel")
    found = "has" if hasattr(module, "ReplicateParallel") else "lacks"
    return f"{module.__name__} {found} ReplicateParallel, which accelerate's _prepare_tp imports"


def parameters_left_gathered() -> str:
    torch.manual_seed(0)
    model = loaded(LlamaForCausalLM(LlamaConfig(**SIZE)), distributed_config=DistributedConfig(fsdp_size=2))
    sharded = dict(model.named_parameters())
    with torch.no_grad():
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    gathered = [name for name, param in model.named_parameters() if param is not sharded[name]]
    return f"after an evaluation, an optimizer of model.parameters() would not have the sharded {', '.join(gathered)}"


if __name__ == "__main__":
    if not torch.accelerator.is_available():
        torch._C._get_accelerator = lambda *_: torch.device("cpu")
    dist.init_process_group("gloo")
    for check in (
        gradients_summed_again,
        norm_and_head_in_one_group,
        import_of_a_removed_name,
        parameters_left_gathered,
    ):
        text = check()
        if dist.get_rank() == 0:
            print(f"- {text}", flush=True)
    dist.barrier()
