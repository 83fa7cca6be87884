"""`hf-lowprec estimate` prints tables of what training takes, and lines that train."""

import json
import re

import pytest
import torch
from transformers import (
    BertConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Trainer,
    TrainingArguments,
    ViTConfig,
)
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from hf_lowprec.tools.cli.estimate import explain
from hf_lowprec.tools.estimate.fit import OPTIONS, Setting
from hf_lowprec.tools.estimate.memory import FP32_ROW
from tests.support.command_output import hf_lowprec, unboxed
from tests.support.command_output import refused as refused_by_command
from tests.support.optim.simulated_copies import simulate_device
from tests.support.training.tiny_trainer import arguments, counting_data, llama

GIB = 2**30
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def run(*words, columns=80):
    return hf_lowprec("estimate", *words, columns=columns)


def refused(*words) -> str:
    return refused_by_command("estimate", *words)


def numbers(result, name: str) -> list[str]:
    """The cells of the row `name`."""
    (line,) = (line for line in result.output.splitlines() if line.strip().startswith(name))
    return line.replace(name, "").split()


def write_config(folder, config, cls: str):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": [cls]}))
    return folder


@pytest.fixture
def tiny(tmp_path):
    return write_config(tmp_path / "tiny", LlamaConfig(**TINY), "LlamaForCausalLM")


@pytest.fixture
def images(tmp_path):
    config = ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    return write_config(tmp_path / "vit", config, "ViTForImageClassification")


def test_the_table_of_a_large_model(tmp_path):
    hidden, intermediate, layers, words, keys = 4096, 14336, 32, 128256, 1024
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    norms = (2 * layers + 1) * hidden
    matrices = 2 * words * hidden + layers * (2 * hidden * hidden + 2 * keys * hidden + 3 * hidden * intermediate)
    result = run(write_config(tmp_path, config, "LlamaForCausalLM"), "--gpus", 8, "--gpu-memory", 80)
    assert f"LlamaForCausalLM, {matrices + norms:,} parameters, {norms:,} of which stay in FP32" in result.output
    assert max(map(len, result.output.splitlines()[1:])) <= 80
    for name, each in ((FP32_ROW, 16), ("adamw_bf16_split", 10), ("adamw_bf16_kahan", 10), ("adamw_bf16_sr", 8)):
        total = each * matrices + 16 * norms
        expected = [total, total / (matrices + norms) * GIB, total / 8, 80 * GIB - total / 8]
        assert numbers(result, name)[-4:] == [f"{value / GIB:,.2f}" for value in expected]
    narrow = run(tmp_path, "--gpus", 8, "--gpu-memory", 80, columns=40)
    assert numbers(narrow, FP32_ROW) == numbers(result, FP32_ROW)  # not cut


def test_tied_weights_count_once(tmp_path):
    for tied in (True, False):
        config = LlamaConfig(**TINY, tie_word_embeddings=tied)
        count = sum(param.numel() for param in LlamaForCausalLM(config).parameters())
        assert f" {count:,} parameters" in run(write_config(tmp_path, config, "LlamaForCausalLM")).output


def test_whole_gradients_count_for_every_gpu(tmp_path):
    config = LlamaConfig(vocab_size=2**20, hidden_size=256, num_hidden_layers=0, num_attention_heads=2)
    folder = write_config(tmp_path, config, "LlamaForCausalLM")
    result = run(folder, "--gpus", 8, "--gradient-accumulation-steps", 4)
    assert numbers(result, FP32_ROW) == ["2.00", "18.00", "4.00", "24.00", "48.00", "3.00"]
    assert "Weights, grads, state, total and bytes per parameter are those of all 8 GPUs." in result.output


def test_room_for_activations_is_not_called_free(tiny, images):
    without = unboxed(run(tiny, "--gpu-memory", 80))
    assert "free" not in without and "left for" in without
    assert "Activations are not included; add --batch-size and --sequence-length." in without
    size = ("--batch-size", 64, "--sequence-length", 2048)
    counted = run(tiny, "--gpu-memory", 80, *size)
    assert "free of" in counted.output and "left for" not in counted.output
    activations, peak, free = map(float, numbers(counted, FP32_ROW)[-3:])
    assert 0 < activations <= peak == pytest.approx(80 - free)
    assert float(numbers(run(tiny, *size, "--gradient-checkpointing"), FP32_ROW)[-2]) < activations
    missing = unboxed(run(images, "--batch-size", 2, "--sequence-length", 8, "--gpu-memory", 80))
    assert "Activations in BF16 are not included: ViTForImageClassification takes pixel_values" in missing
    assert "left for" in missing and "free of" not in missing


def test_activations_may_be_missing_in_one_dtype_only(monkeypatch, tmp_path):
    """As in torch 2.13, where routed experts need grouped products that FP32 matrices without values do not have."""

    def without_fp32(self, hidden_states, *routing, forward=MixtralExperts.forward):
        if hidden_states.dtype == torch.float32:
            raise RuntimeError("Expected mat_a to be BFloat16")
        return forward(self, hidden_states, *routing)

    monkeypatch.setattr(MixtralExperts, "forward", without_fp32)
    config = MixtralConfig(**TINY, num_local_experts=2, num_key_value_heads=2)
    folder = write_config(tmp_path / "moe", config, "MixtralForCausalLM")
    result = run(folder, "--batch-size", 1, "--sequence-length", 16, "--gpu-memory", 80)
    assert numbers(result, FP32_ROW)[-3:] == ["-", "-", "-"]
    assert "-" not in numbers(result, "adamw_bf16_split")
    assert "Activations in FP32 are not included: MixtralForCausalLM does not run on tensors" in result.output
    assert "Activations in BF16" not in result.output


def test_columns_that_only_some_optimizers_need(tmp_path):
    config = LlamaConfig(**{**TINY, "vocab_size": 8, "hidden_size": 4096, "intermediate_size": 8192})
    folder = write_config(tmp_path / "wide", config, "LlamaForCausalLM")
    muon = run(folder, "--optim", "muon_bf16_kahan")
    weights, gradients, state, step, total = map(float, numbers(muon, "muon_bf16_kahan")[:-1])
    assert "in step" in muon.output and "on host" not in muon.output and step > 0
    assert total == pytest.approx(weights + gradients + state + step, abs=0.02)
    on_host = run(folder, "--optim", "adamw_bf16_sr", "--optim-args", "offload_states=True")
    weights, gradients, state, host, total = map(float, numbers(on_host, "adamw_bf16_sr")[:-1])
    assert "on host" in on_host.output and state == 0 < host
    assert total == pytest.approx(weights + gradients, abs=0.02)
    assert "Rows of adamw_bf16_sr: with optim_args='offload_states=True'." in on_host.output


def test_what_cannot_be_estimated_is_said(tiny, tmp_path):
    assert "unknown: adamw_torch; valid are" in refused(tiny, "--optim", "adamw_torch")
    assert "'state_dtpe' is not an argument" in refused(tiny, "--optim-args", "state_dtpe=float32")
    assert "not of the form key=value" in refused(tiny, "--optim-args", "betas=0.9=0.95")
    assert "activations need both" in refused(tiny, "--batch-size", 2)
    for option in ("--gradient-checkpointing", "--chunked-loss"):
        assert "--gradient-checkpointing and --chunked-loss need" in refused(tiny, option)
    config = BertConfig(num_hidden_layers=1)
    assert "class BertOfTomorrow, which transformers does not have" in refused(
        write_config(tmp_path / "odd", config, "BertOfTomorrow")
    )


def test_the_best_setting_is_marked_and_printed(tiny):
    result = run(tiny, "--gpu-memory", 80, "--fit")
    assert result.exit_code == 0
    assert "LlamaForCausalLM, 1 x 4,096 tokens per GPU and step" in result.output
    (marked,) = (line for line in result.output.splitlines() if "→" in line)
    assert marked.split()[1:6] == ["split,", "without", "gradient", "checkpointing", "1"] and marked.endswith("yes  ")
    assert max(map(len, result.output.splitlines()[1:])) <= 80
    assert 'optim="adamw_bf16_split",\n    gradient_checkpointing=False,' in result.output
    assert "--chunked-loss" not in result.output


def test_what_is_missing_is_said_if_nothing_fits(tiny):
    result = run(tiny, "--gpu-memory", 1, "--batch-size", 2, "--sequence-length", 64, "--fit")
    assert result.exit_code == 1 and "→" not in result.output and "TrainingArguments" not in result.output
    assert "Nothing fits: 1.00 GiB are missing for split, states, gradients on host" in result.output


def test_a_chunked_loss_is_named_where_it_makes_a_better_setting_fit(tmp_path):
    folder = write_config(tmp_path, LlamaConfig(**{**TINY, "vocab_size": 2**17}), "LlamaForCausalLM")
    result = run(folder, "--gpu-memory", 4, "--fit")
    assert result.exit_code == 1
    (peak,) = re.findall(r"\(--chunked-loss\), the peak of split, without .* is (\S+) GiB: it fits.", result.output)
    chunked = run(folder, "--gpu-memory", 4, "--fit", "--chunked-loss")
    assert chunked.exit_code == 0 and numbers(chunked, "→ split, without gradient checkpointing")[2] == peak
    assert "--chunked-loss" not in chunked.output
    size = ("--batch-size", 1, "--sequence-length", 4096)
    of_all, of_chunks = (
        float(numbers(run(folder, *size, *words), "adamw_bf16_sr")[-2]) for words in ((), ("--chunked-loss",))
    )
    assert of_all > 3 * 4096 * 2**17 * 4 / GIB > 2 > of_chunks > 4096 * 2**15 * 2 / GIB  # three FP32 tensors; a chunk


CASES = [(option, option is OPTIONS[0]) for option in OPTIONS]


@pytest.mark.parametrize(("option", "sync"), CASES, ids=[option.title for option in OPTIONS])
def test_the_lines_to_paste_train(tmp_path, monkeypatch, option, sync):
    if "offload_states" in option.optim_args:
        simulate_device(monkeypatch)
    printed = explain([Setting(option, 4, 1, sync, GIB, -1, GIB, GIB)], 80, GIB)
    assert ("use a warmup" in printed) == ("clip=delayed" in option.optim_args)
    names = {"TrainingArguments": lambda **settings: arguments(**{**settings, "tmp_path": tmp_path, "max_steps": 1})}
    exec(printed[printed.index("args = ") :].replace('output_dir="out",', ""), names)
    args = names["args"]
    assert isinstance(args, TrainingArguments) and args.per_device_train_batch_size == 4
    assert (args.optim, args.optim_args or "") == (option.optim, option.optim_args)
    assert args.gradient_checkpointing == option.gradient_checkpointing
    trainer = Trainer(llama(), args, train_dataset=counting_data(4))
    assert trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False) == sync
    trainer.train()


def test_arguments_that_fit_cannot_use(tiny, images):
    assert "--fit needs --gpu-memory" in refused(tiny, "--fit")
    for words in (("--optim", "lion_bf16_sr"), ("--optim-args", "state_dtype=int8")):
        assert "leave out --optim" in refused(tiny, "--fit", "--gpu-memory", 80, *words)
    assert "takes pixel_values" in refused(images, "--fit", "--gpu-memory", 80)
