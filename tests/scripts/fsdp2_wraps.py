"""Train models that accelerate shards in every order it can, and under DDP; each prints one digest of weights and states.

fsdp2_wraps.py [CASE …]
"""

import os
import sys
from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard

import hf_lowprec
from tests.fsdp_on_cpu import allow_fsdp_on_cpu
from tests.ranks import leave
from tests.scripts.trainer_ranks import digest, llama

WIDTH, STEPS = 16, 3


class Block(nn.Module):
    """A layer with its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Scaled(nn.Module):
    """An FP32 parameter above an FP32 norm."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.ones(WIDTH)), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(x.float()) * self.scale).to(x.dtype)


class Plain(nn.Module):
    """Layers, a parameter of the model's own, a norm and a head; no input embeddings that accelerate would see."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.offset = nn.Embedding(256, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.blocks, self.scaled = nn.ModuleList([Block(), Block()]), Scaled()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids) + self.offset
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.scaled(x)))


class Embedding(Plain):
    """One whose embeddings accelerate shards by themselves."""

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class Tied(Embedding):
    """One whose embeddings share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.table.weight

    def tie_weights(self) -> None:
        self.head.weight = self.table.weight


class Outer(nn.Module):
    """A model in a model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = inner, nn.LayerNorm(256)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(input_ids))


class Partly(Plain):
    """One whose first layer the user has sharded."""


def adapted(**options) -> nn.Module:
    torch.manual_seed(0)
    return get_peft_model(llama(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False, **options))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "embedding": Embedding,
    "tied": Tied,
    "outer": lambda: Outer(Plain()),
    "partly": Partly,
    "llama": llama,
    "tied-llama": lambda: llama(tie_word_embeddings=True),
    "adapters": adapted,
    "saved-norm": lambda: adapted(modules_to_save=["norm"]),
    "saved-all": lambda: adapted(modules_to_save=["norm", "input_layernorm", "lm_head"]),
}
WRAPS: dict[str, dict] = {
    "none": {"auto_wrap_policy": "no_wrap"},
    "every": {"auto_wrap_policy": "size_based_wrap", "min_num_params": 0},
    "large": {"auto_wrap_policy": "size_based_wrap", "min_num_params": 300},
    "class": {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]},
    "norms": {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LayerNorm", "Block"]},
    "layers": {"auto_wrap_policy": "transformer_based_wrap"},
}
KEPT = {"": (), "blocks": ("blocks.0",), "table": ("table", "head"), "embed": ("embed_tokens", "lm_head")}
KEPT |= {"layer": ("layers.0",)}
OPTIONS = {"meta": {"cpu_ram_efficient_loading": True}, "checkpointed": {"activation_checkpointing": True}}


def train(case: str, sharded: bool) -> str:
    """The digest of a model after steps on other data on every rank."""
    name, wrap, kept, *switched = (*case.split(","), "", "")[: max(3, case.count(",") + 1)]
    plugin = dynamo = None
    if "compiled" in switched:
        dynamo = TorchDynamoPlugin(backend="aot_eager")
    if sharded:
        extra = {k: v for option in switched for k, v in OPTIONS.get(option, {}).items()}
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, **{"cpu_ram_efficient_loading": False, **WRAPS[wrap], **extra}
        )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, dynamo_plugin=dynamo)
    hf_lowprec.prepare_accelerator(accelerator)
    found = []
    shared = None
    for _ in range(2 if "twice" in switched else 1):
        torch.manual_seed(1)
        model = MODELS[name]()
        if shared is not None and "shared" in switched:
            model.blocks = shared
        else:
            hf_lowprec.cast_model(model, keep_fp32=(*(["scaled"] if hasattr(model, "scaled") else []), *KEPT[kept]))
        if sharded and name == "partly":
            fully_shard(model.blocks[1].linear)
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = hf_lowprec.AdamW(params, lr=1e-2, rounding="stochastic")
        prepared, optimizer = accelerator.prepare(model, optimizer)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(10 * step + accelerator.process_index)
            tokens = torch.randint(0, 256, (2, 8), generator=generator)
            out = prepared(input_ids=tokens)
            loss = nn.functional.cross_entropy(getattr(out, "logits", out).float().flatten(0, 1), tokens.flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(digest(prepared, optimizer.optimizer))
    return " ".join(found)


if __name__ == "__main__":
    allow_fsdp_on_cpu()
    references: dict[str, str] = {}
    for case in sys.argv[1:]:
        model, wrap, kept, *switched = (*case.split(","), "", "")[: max(3, case.count(",") + 1)]
        key = ",".join((model, "", kept, "twice" if "twice" in switched else ""))
        references[case] = references.get(key) or references.setdefault(key, train(key, sharded=False))
    for case in sys.argv[1:]:
        try:
            found = train(case, sharded=True)
            verdict = "equal" if references[case] == found else "DIFFERENT"
        except BaseException as e:
            import traceback
            verdict = f"{type(e).__name__}: {str(e).splitlines()[0][:150]}"
            if "TB" in os.environ: traceback.print_exc()
        if os.environ["RANK"] == "0":
            print(case, verdict, flush=True)
    leave()
