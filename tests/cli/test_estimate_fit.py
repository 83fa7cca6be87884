"""`hf-lowprec estimate --fit` prints a table, and lines that train."""

import json

import pytest
from transformers import Trainer, TrainingArguments, ViTConfig

from hf_lowprec.tools.cli.estimate_fit import print_table
from hf_lowprec.tools.estimate.fit import OPTIONS, Fit, Setting
from tests.support.command_output import hf_lowprec, refused
from tests.support.optim.simulated_copies import simulate_device
from tests.support.training.tiny_trainer import arguments, counting_data, llama

GIB = 1 << 30


@pytest.fixture
def folder(tmp_path):
    config = llama().config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def run(*words):
    return hf_lowprec("estimate", *words, "--fit")


def test_the_best_setting_is_marked_and_printed(folder):
    result = run(folder, "--gpu-memory", 80)
    assert result.exit_code == 0
    assert "LlamaForCausalLM, 1 x 4,096 tokens per GPU and step" in result.output
    (marked,) = (line for line in result.output.splitlines() if "→" in line)
    assert marked.split()[1:6] == ["split,", "without", "gradient", "checkpointing", "1"] and marked.endswith("yes  ")
    assert max(map(len, result.output.splitlines()[1:])) <= 83
    assert 'optim="adamw_bf16_split",\n    gradient_checkpointing=False,' in result.output
    data = json.loads(run(folder, "--gpu-memory", 80, "--json").output)
    assert data["best"] == 0 and data["settings"][0]["missing"] == 0
    assert data["load_in_fp32"] == 4 * sum(param.numel() for param in llama().parameters())


def test_what_is_missing_is_said_if_nothing_fits(folder):
    result = run(folder, "--gpu-memory", 1, "--lora", 2, "--batch-size", 2, "--sequence-length", 64)
    assert result.exit_code == 1 and "→" not in result.output and "TrainingArguments" not in result.output
    data = json.loads((as_json := run(folder, "--gpu-memory", 1, "--json")).output)
    assert as_json.exit_code == 1 and data["best"] is None
    assert "Nothing fits: 1.00 GiB are missing for split, states and gradients on the host" in result.output
    assert "LoRA of rank 2 takes 0.00 GiB per GPU" in result.output


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.title)
def test_the_lines_to_paste_train(tmp_path, capsys, monkeypatch, option, sync):
    if "offload_states" in option.optim_args:
        simulate_device(monkeypatch)
    print_table("title", Fit([Setting(option, 4, 1, sync, GIB, -1, GIB, GIB)], GIB, GIB), 80, lora=16)
    printed = capsys.readouterr().out
    assert ("use a warmup" in printed) == ("clip=delayed" in option.optim_args)
    names = {"TrainingArguments": lambda **settings: arguments(**{**settings, "tmp_path": tmp_path, "max_steps": 1})}
    source = printed[printed.index("args = ") :].replace('output_dir="out",', "")
    exec(source, names)
    args = names["args"]
    assert isinstance(args, TrainingArguments) and args.per_device_train_batch_size == 4
    assert (args.optim, args.optim_args or "") == (option.optim, option.optim_args)
    assert args.gradient_checkpointing == option.gradient_checkpointing
    trainer = Trainer(llama(), args, train_dataset=counting_data(4))
    assert trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False) == sync
    trainer.train()


def test_arguments_that_fit_cannot_use(folder, tmp_path):
    assert "--fit needs --gpu-memory" in refused("estimate", folder, "--fit")
    for words in (("--optim", "lion_bf16_sr"), ("--optim-args", "state_dtype=int8"), ("--compare",)):
        assert "leave out --optim" in refused("estimate", folder, "--fit", "--gpu-memory", 80, *words)
    config = ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["ViTForImageClassification"]}))
    assert "takes pixel_values" in refused("estimate", tmp_path, "--fit", "--gpu-memory", 80)
