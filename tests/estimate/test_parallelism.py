"""What tensor and expert parallelism and DeepSpeed's ZeRO leave on a GPU."""

import json

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hf_lowprec.integrations.checkpoint_files.input_errors import InputError
from hf_lowprec.optim.sharding import local_shard
from hf_lowprec.tools.estimate.parallelism import Parallelism
from hf_lowprec.tools.estimate.rows import fp32_row, low_precision_row
from tests.support.command_output import hf_lowprec, refused

TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}

MEASURED = {
    # Tensors of DeepSpeed 0.19.8 on two ranks when the step's gradients are flattened, without its buckets.
    (1, "stock"): {2: 12.0},
    (1, "adamw_bf16_split"): {2: 7.0},
    (2, "adamw_bf16_split"): {2: 7.0},
    (3, "stock"): {2: 11.0},
    (3, "adamw_bf16_split"): {2: 6.0},
}
BY_HAND = {
    # Weights and gradients on every GPU: 4; masters 4 and states 8 divided.
    (1, "stock"): {4: 7.0, 8: 5.5},
    # In the step, of the partition: masters 4, states 8, gradients 2 twice and 4.
    (2, "stock"): {8: 4.5},
    (3, "stock"): {8: 22 / 8},
    # Compensation or remainder 2, moments 4; gradients of the partition 2 twice.
    (1, "adamw_bf16_split"): {8: 4.75},
    (1, "adamw_bf16_sr"): {8: 4.5},
    (2, "adamw_bf16_kahan"): {8: 3.25},
    (2, "adamw_bf16_sr"): {8: 3.0},
    (3, "adamw_bf16_sr"): {8: 1.25},
    (3, "sgd_bf16_kahan"): {8: (2 + 2 + 4 + 2) / 8},
}


@pytest.mark.parametrize(("case", "table"), [*MEASURED.items(), *BY_HAND.items()])
def test_bytes_per_parameter_under_zero(case, table):
    stage, optim = case
    for gpus, expected in table.items():
        model = nn.Linear(64, 64, bias=False, device="meta")
        options = (gpus, 1, Parallelism(zero=stage))
        words = "momentum=0.9" if optim.startswith("sgd") else None
        row = fp32_row(model, *options) if optim == "stock" else low_precision_row(model, optim, words, *options)
        assert row.per_gpu(gpus) / 64**2 == expected


def test_micro_batches_under_zero():
    """The partition's gradients are kept while the next ones are computed; ZeRO 3 adds in place."""
    for stage, expected in {1: 4 + 8 / 8, 2: 2 + 10 / 8, 3: 12 / 8}.items():
        model = nn.Linear(64, 64, bias=False, device="meta")
        row = low_precision_row(model, "adamw_bf16_split", None, 8, 4, Parallelism(zero=stage))
        assert row.per_gpu(8) / 64**2 == expected


EXPERTS = MixtralConfig(**TINY, num_local_experts=4, num_key_value_heads=2)
BY_THEMSELVES = MixtralConfig.from_dict(EXPERTS.to_dict())
BY_THEMSELVES.base_model_tp_plan = {k: v for k, v in EXPERTS.base_model_tp_plan.items() if "experts" not in k}
MODELS = {
    "biases": lambda: LlamaForCausalLM(LlamaConfig(**TINY, attention_bias=True, mlp_bias=True)),
    "experts": lambda: MixtralForCausalLM(EXPERTS),
    "experts by themselves": lambda: MixtralForCausalLM(BY_THEMSELVES),
}


@pytest.mark.parametrize(
    ("name", "tp", "ep"),
    [("biases", 2, 1), ("experts", 2, 1), ("experts", 2, 2), ("experts", 1, 2), ("experts by themselves", 2, 2)],
)
def test_a_gpu_has_what_transformers_leaves_on_it(two_fake_ranks, name, tp, ep):
    distributed = pytest.importorskip("transformers.distributed.configuration_utils")
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    with torch.device("meta"):
        whole, other, sharded = (MODELS[name]() for _ in range(3))
    fsdp = 2 // tp
    config = distributed.DistributedConfig(tp_size=tp, ep_size=ep, fsdp_size=fsdp)
    tp_plan, ep_plan, _ = sharded._resolve_parallel_plans(config)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    if tp > 1:
        apply_tensor_parallelism(sharded, mesh, tp_plan)
    if ep > 1:
        apply_expert_parallelism(sharded, mesh, mesh, ep_plan)
    # FSDP2 divides what is left: experts among the GPUs that have the same ones.
    elements = sum(
        local_shard(param).numel() / (2 // ep if ep > 1 and "experts" in name else fsdp)
        for name, param in sharded.named_parameters()
    )
    parallelism = Parallelism(tp, ep)
    assert fp32_row(whole, 2, 1, parallelism).per_gpu(2) == 16 * elements
    row = low_precision_row(other, "adamw_bf16_kahan", None, 2, 1, parallelism)
    norms = sum(param.numel() for name, param in whole.named_parameters() if "norm" in name)
    # 10 bytes of a BF16 parameter; 16 of an FP32 one, which every GPU of a tensor-parallel group has.
    assert row.per_gpu(2) == 10 * elements + 6 * norms / fsdp


def test_the_command_and_what_it_refuses(tmp_path):
    config = LlamaConfig(**TINY, architectures=["LlamaForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    data = json.loads(hf_lowprec("estimate", tmp_path, "--gpus", 8, "--zero", 2, "--json").output)
    norms = 5 * 64  # in FP32, with states in FP32; two layers have four of the five
    share = norms / sum(param.numel() for param in LlamaForCausalLM(config).parameters())
    split, sr = ((1 - share) * (2 + (4 + states) / 8) + share * (4 + (8 + 8) / 8) for states in (6, 4))
    assert [row["bytes_per_parameter_per_gpu"] for row in data["rows"]] == pytest.approx([4.5, split, split, sr])
    with pytest.raises(InputError, match=r"--zero .* --tp"):
        Parallelism(2, 1, 3).check(2, 1)
    for words, message in {
        ("--gpus", 8, "--tp", 3): "--gpus 8 must be a multiple of --tp 3",
        ("--gpus", 8, "--ep", 2): "LlamaForCausalLM has no ep_plan",
        ("--gpus", 2, "--tp", 2, "--gradient-accumulation-steps", 2): "leave out --gradient-accumulation-steps",
        ("--gpus", 2, "--zero", 3, "--optim", "muon_bf16_kahan"): "Muon needs whole tensors",
        (
            "--gpus",
            2,
            "--zero",
            3,
            "--optim-args",
            "gradient_release=True",
        ): "gradient_release=True: DeepSpeed averages",
        ("--gpus", 2, "--zero", 3, "--compare"): "do not go with --fit, --compare and --lora",
        ("--gpus", 2, "--tp", 2, "--batch-size", 1, "--sequence-length", 8): "leave out --batch-size",
    }.items():
        assert message in " ".join(refused("estimate", tmp_path, *words).split()), words
