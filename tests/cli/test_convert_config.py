"""`hf-lowprec convert-config` writes what accelerate loads, and lists the rest."""

import json
from pathlib import Path

import pytest
from accelerate.commands import launch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

import hf_lowprec as package
from hf_lowprec.tools.cli.convert_config import _OPTIMIZERS
from tests.support.command_output import hf_lowprec, refused
from tests.support.processes.ranks import run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def convert(folder: Path, config: dict, *, gpus: int = 8) -> tuple[str, list[str]]:
    """The file, and the lines that are printed after its name."""
    source, out = folder / "ds_config.json", folder / "fsdp2.yaml"
    source.write_text(json.dumps(config))
    first, *others = hf_lowprec("convert-config", source, out, "--gpus", gpus, columns=500).output.splitlines()
    assert first == f"{out}: accelerate launch --config_file {out} train.py"
    return str(out), [line.strip() for line in others]


def launched(file: str, script: str) -> tuple[dict[str, str], list[str]]:
    """The variables in which `accelerate launch` starts a script, and the script with its arguments."""
    words = ["--config_file", file, "--main_process_port", "0", *script.split()]
    args, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    return prepare_multi_gpu_env(args), [args.training_script, *args.training_script_args]


@pytest.mark.parametrize(("stage", "reshards"), [(1, False), (2, False), (3, True)])
@pytest.mark.parametrize(
    "offload", [{}, {"offload_optimizer": {"device": "none"}}, {"offload_param": {"device": "cpu"}}], ids=str
)
def test_accelerate_shards_as_the_stage_does(tmp_path, monkeypatch, stage, reshards, offload):
    file, _ = convert(tmp_path, {"zero_optimization": {"stage": stage, **offload}})
    loaded = load_config_from_file(file)
    assert (loaded.distributed_type, loaded.num_processes, loaded.mixed_precision) == (DistributedType.FSDP, 8, "no")
    for name, value in launched(file, "train.py")[0].items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, reshards)
    assert type(plugin.cpu_offload) is (CPUOffloadPolicy if "offload_param" in offload else OffloadPolicy)


def test_what_belongs_elsewhere_is_listed(tmp_path):
    config = {
        "bf16": {"enabled": True},
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 4,
        "train_batch_size": "auto",
        "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 100, "cos_min_ratio": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme"},
            "stage3_prefetch_bucket_size": 5,
            "reduce_bucket_size": "auto",
        },
    }
    _, notes = convert(tmp_path, config)
    assert notes == [
        "gradient_clipping=0.5: in TrainingArguments, max_grad_norm",
        "gradient_accumulation_steps=4: in TrainingArguments, gradient_accumulation_steps",
        "optimizer.type=Adam: --optim adamw_bf16_split",
        "optimizer.params.lr=1e-05: in TrainingArguments, learning_rate",
        "optimizer.params.betas=[0.9, 0.95]: in TrainingArguments, adam_beta1, adam_beta2",
        "scheduler.type=WarmupCosineLR: in TrainingArguments, lr_scheduler_type='cosine'",
        "scheduler.params.warmup_num_steps=100: in TrainingArguments, warmup_steps",
        "zero_optimization.offload_optimizer.device=nvme: FSDP2 offloads weights, gradients and states together, to "
        "the CPU's memory",
        "from TrainingArguments, as before: train_batch_size, optimizer.params.weight_decay",
        "without a counterpart: scheduler.params.cos_min_ratio=0.1, zero_optimization.stage3_prefetch_bucket_size=5",
    ]
    assert {f"{name}_bf16_split" for name in (*_OPTIMIZERS.values(), "adam")} <= set(package.OPTIMIZER_NAMES)


def test_optimizers_of_other_names(tmp_path):
    def converted(**optimizer):
        (tmp_path / "fsdp2.yaml").unlink(missing_ok=True)
        return convert(tmp_path, {"optimizer": optimizer, "zero_optimization": {"stage": 2}})[1]

    assert converted(type="Adam", params={"adam_w_mode": False}) == ["optimizer.type=Adam: --optim adam_bf16_split"]
    assert converted(type="Lamb") == ["without a counterpart: optimizer.type=Lamb"]


def test_what_cannot_be_converted(tmp_path):
    source = tmp_path / "ds_config.json"
    for text, message in (
        ("{}", "zero_optimization.stage=0 partitions nothing; train with DDP"),
        ("[", "not readable"),
    ):
        source.write_text(text)
        assert message in refused("convert-config", source, tmp_path / "out.yaml", "--gpus", 2)
    file, _ = convert(tmp_path, {"zero_optimization": {"stage": 2}})
    assert "exists" in refused("convert-config", source, file, "--gpus", 2)


@pytest.mark.every_case
@pytest.mark.slow
@pytest.mark.distributed
def test_training_starts_from_it(tmp_path):
    """In the environment that `accelerate launch` makes."""
    file, _ = convert(tmp_path, {"zero_optimization": {"stage": 2}}, gpus=2)
    script = f"{EXAMPLES}/continued_pretraining.py --smoke --use_cpu --output_dir {tmp_path / 'out'} --max_steps 2"
    variables, command = launched(file, f"{script} --save_strategy no --disable_tqdm True")
    assert "FSDP2: FP32 sums over 2 ranks" in run_ranks("example_on_cpu.py", 2, *command, **variables)
