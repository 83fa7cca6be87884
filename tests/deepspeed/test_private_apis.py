"""The private names of DeepSpeed that its `private_apis.py` relies on; each failure says what went away."""

import ast
import inspect

import deepspeed
import pytest
import torch

from tests.support.processes.ranks import on_ranks

WHERE = f"in deepspeed {deepspeed.__version__}; adapt hf_lowprec/integrations/deepspeed/private_apis.py"
BOTH = {"averaged_gradients", "clip_grad", "dp_process_group", "reduce_scatter", "sequence_parallel_size"}
NAMES = {
    2: {
        *BOTH,
        *("allreduce_and_scatter", "check_grad_overflow", "gradient_average", "parallel_partitioned_bit16_groups"),
        *("partition_size", "real_dp_process_group", "round_robin_bit16_groups", "round_robin_bit16_offsets"),
        *("scaled_global_norm", "single_partition_of_fp32_groups", "use_multi_rank_bucket_allreduce"),
    },
    3: {
        *BOTH,
        *("_get_norm_groups", "_get_param_partition_group", "_get_sub_group_process_group"),
        *("fp16_groups", "fp16_partitioned_groups_flat"),
        *("fp32_partitioned_groups_flat", "gradient_accumulation_dtype", "sub_group_to_group_id"),
        "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
    },
}
"""Attributes of ZeRO optimizers, by stage."""
OF_PARAMETERS = {"ds_numel", "ds_shape", "ds_tensor", "partition_numel"}
STATE_KEYS = {
    2: {"single_partition_of_fp32_groups", "base_optimizer_state", "partition_count", "zero_stage"},
    3: {"fp32_flat_groups", "optimizer_state_dict", "partition_count", "zero_stage"},
}


def names() -> dict[str, list[str]]:
    """The attributes of ZeRO's optimizers around torch's AdamW, of their state dicts, and of ZeRO 3's parameters."""
    found = {}
    for stage in (2, 3):
        model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        }
        optimizer = torch.optim.AdamW(model.parameters())
        zero = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[1]
        found |= {f"zero {stage}": dir(zero), f"state dict {stage}": [*zero.state_dict()]}
    return {**found, "parameter": dir(model.weight)}


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return on_ranks(names, 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_optimizers_have_the_names(found, stage):
    missing = NAMES[stage] - set(found[f"zero {stage}"])
    assert not missing, f"the optimizer of ZeRO {stage} has no {sorted(missing)} {WHERE}"
    missing = STATE_KEYS[stage] - set(found[f"state dict {stage}"])
    assert not missing, f"the state dict of ZeRO {stage} has no {sorted(missing)} {WHERE}"


def test_partitioned_parameters_have_the_names(found):
    missing = OF_PARAMETERS - set(found["parameter"])
    assert not missing, f"parameters under ZeRO 3 have no {sorted(missing)} {WHERE}"


def test_classes_and_modules_have_the_names():
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import stage3

    for owner, name in (
        (DeepSpeedEngine, "_cast_module_mixed_precision"),
        (DeepSpeedEngine, "_DeepSpeedEngine__check_params"),
        (stage3, "defragment"),
        (stage3.DeepSpeedZeroOptimizer_Stage3, "_set_fp16_partitioned_groups_flat"),
    ):
        assert hasattr(owner, name), f"{owner.__name__} has no {name} {WHERE}"


def test_this_list_has_every_name():
    from hf_lowprec.integrations.deepspeed import private_apis

    names = {"zero": set(), "param": set()}
    for node in ast.walk(ast.parse(inspect.getsource(private_apis))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            names[node.value.id].add(node.attr)
    assert names["zero"] - {"state_dict", "load_state_dict"} <= NAMES[2] | NAMES[3]
    assert {name for name in names["param"] if name.startswith(("ds_", "partition"))} == OF_PARAMETERS - {"ds_tensor"}
