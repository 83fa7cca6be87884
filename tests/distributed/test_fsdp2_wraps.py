"""Models that accelerate shards by several calls, in different orders: each ends with the weights and states of DDP."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch import nn
from torch.distributed.fsdp import fully_shard

import hf_lowprec
from tests.scripts.trainer_ranks import llama
from tests.support.chosen_cases import EVERY_CASE
from tests.support.processes.fsdp_on_cpu import allow_fsdp_on_cpu
from tests.support.processes.ranks import on_ranks
from tests.support.processes.shards import digest

WIDTH, STEPS = 16, 2


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


class Outer(nn.Module):
    """A model in a model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Plain(), nn.LayerNorm(256)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(input_ids))


def adapted(*saved: str) -> nn.Module:
    """Adapters, and modules that PEFT copies to train them."""
    import peft

    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, modules_to_save=list(saved) or None)
    return peft.get_peft_model(llama(), config)


def tied_llama() -> nn.Module:
    return llama(tie_word_embeddings=True)


def saved_norms() -> nn.Module:
    return adapted("norm", "input_layernorm", "lm_head")


def partly_sharded(model: nn.Module) -> None:
    """Shard one layer, as a user may before `prepare`."""
    fully_shard(model.blocks[1].linear)


WRAPS: dict[str, dict] = {
    "no wrap": {"auto_wrap_policy": "no_wrap"},
    "every module": {"auto_wrap_policy": "size_based_wrap", "min_num_params": 0},
    "blocks": {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]},
    "norms and blocks": {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["LayerNorm", "Block"],
    },
    "layers": {"auto_wrap_policy": "transformer_based_wrap"},
}


@dataclass(frozen=True)
class Case:
    """A model, how accelerate is to wrap it, and what else is switched on."""

    model: Callable[[], nn.Module]
    wrap: str
    keep_fp32: tuple[str, ...] = ()
    options: dict[str, bool] = field(default_factory=dict)
    first: Callable[[nn.Module], None] | None = None
    compiled: bool = False
    models: int = 1

    @property
    def unwrapped(self) -> tuple:
        """The case without what is for FSDP2 alone."""
        return self.model, self.keep_fp32, self.models

    def __str__(self) -> str:
        first = [self.first.__name__] if self.first else []
        also = [*self.keep_fp32, *self.options, *first, *["compiled"] * self.compiled, *["twice"] * (self.models > 1)]
        return ", ".join([self.model.__name__, self.wrap, *also])


EMBEDDINGS = ("table", "head")
CASES = [
    # The tail is listed before the first call, and has a norm, or all there is.
    Case(tied_llama, "no wrap", options={"cpu_ram_efficient_loading": True}),
    Case(Plain, "no wrap", models=2),
    # The first call is for an FP32 module.
    Case(Embedding, "no wrap", EMBEDDINGS),
    Case(Plain, "norms and blocks"),
    Case(Outer, "every module"),
    # A call is for a module around FP32 ones, or of FP32 ones alone.
    Case(Plain, "blocks", ("blocks.0",), options={"activation_checkpointing": True}),
    Case(Tied, "every module", EMBEDDINGS),
    # The root is not the model that was given.
    Case(Plain, "no wrap", compiled=True),
    # A part is sharded already.
    Case(Plain, "blocks", first=partly_sharded),
    # Adapters between the model and the names of its modules.
    Case(saved_norms, "layers"),
]
if EVERY_CASE:  # each has one thing less than a case above
    CASES += [Case(Plain, wrap) for wrap in ("no wrap", "every module", "blocks")]
    CASES += [Case(model, "no wrap") for model in (Tied, tied_llama, adapted, saved_norms)]


def train(case: Case, sharded: bool) -> list[str]:
    """The digest of each model after steps on other data on every rank."""
    plugin = dynamo = None
    if sharded:
        options = {"cpu_ram_efficient_loading": False, **WRAPS[case.wrap], **case.options}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
        dynamo = TorchDynamoPlugin(backend="eager") if case.compiled else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, dynamo_plugin=dynamo)
    hf_lowprec.prepare_accelerator(accelerator)
    found = []
    for seed in range(case.models):
        torch.manual_seed(seed)
        model = case.model()
        plain = isinstance(model, Plain | Outer)
        hf_lowprec.cast_model(model, keep_fp32=("scaled", *case.keep_fp32) if plain else case.keep_fp32)
        if sharded and case.first:
            case.first(model)
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = hf_lowprec.AdamW(params, lr=1e-2, rounding="stochastic")
        model, optimizer = accelerator.prepare(model, optimizer)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(10 * step + accelerator.process_index)
            tokens = torch.randint(0, 256, (2, 8), generator=generator)
            out = model(input_ids=tokens)
            logits = getattr(out, "logits", out).float()
            accelerator.backward(nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()))
            optimizer.step()
            optimizer.zero_grad()
        found.append(digest(model.parameters(), optimizer.optimizer))
    return found


def check() -> None:
    allow_fsdp_on_cpu()
    expected: dict[tuple, list[str]] = {}  # by what matters under DDP
    for case in CASES:  # all before the first sharded one: an FSDP plugin stays in the environment
        if case.unwrapped not in expected:
            expected[case.unwrapped] = train(case, sharded=False)
    for case in CASES:
        assert train(case, sharded=True) == expected[case.unwrapped], case


@pytest.mark.every_case
@pytest.mark.slow
@pytest.mark.distributed
def test_weights_and_states_are_those_of_ddp():
    """On three ranks shards are uneven, and a sum in BF16 rounds twice."""
    on_ranks(check, 3)
