"""`hf-lowprec estimate` predicts the bytes that training then holds."""

import json
import re
import socket
import time

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    BertConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    T5Config,
    Trainer,
    TrainerCallback,
    ViTConfig,
)
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from hf_lowprec.integrations.checkpoint_files.input_errors import InputError
from hf_lowprec.reduction import GradientAccumulator
from hf_lowprec.reduction.grad_accumulation import accumulator_bytes
from hf_lowprec.tools.estimate.rows import FP32_ROW, compared_rows, fp32_row, lora_row, low_precision_row
from hf_lowprec.tools.user_inputs import empty_model
from tests.support.command_output import hf_lowprec, unboxed
from tests.support.command_output import refused as refused_by_command
from tests.support.training.tiny_trainer import arguments, counting_data, llama

GIB = 2**30


def run(*words, columns=80):
    return hf_lowprec("estimate", *words, columns=columns)


def refused(*words) -> str:
    return refused_by_command("estimate", *words)


def write_config(folder, config, **changes):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict() | changes))
    return folder


class GradientBytes(TrainerCallback):
    """Counts the bytes that exist when a step begins."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.nbytes = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("optim", "optim_args"),
    [
        ("adamw_bf16_kahan", None),
        ("adamw_bf16_sr", None),
        ("adamw_bf16_kahan", "state_dtype=exp_avg_sq:float32,amsgrad=True"),
        ("adamw_bf16_sr", "keep_fp32=lm_head"),
        ("sgd_bf16_kahan", "momentum=0.9"),
        ("lion_bf16_sr", None),
        ("muon_bf16_kahan", None),
        ("adamw_bf16_split", "state_dtype=int8"),
        ("adan_bf16_sr", "state_dtype=exp_avg:int8|exp_avg_sq:int8"),
    ],
)
def test_it_foretells_what_training_holds(tmp_path, optim, optim_args):
    gradients = GradientBytes()
    args = arguments(tmp_path, optim=optim, optim_args=optim_args, max_steps=1)
    trainer = Trainer(llama(), args, train_dataset=counting_data(8), callbacks=[gradients])
    trainer.train()
    states = (tensors.items() for tensors in trainer.optimizer.optimizer.state.values())
    state = sum(value.nbytes for items in states for name, value in items if name != "step")

    with torch.device("meta"):
        model = LlamaForCausalLM(llama().config)
    row = low_precision_row(model, optim, optim_args)
    assert sum(row.memory.weights.values()) == sum(p.nbytes for p in trainer.model.parameters())
    assert sum(row.memory.gradients.values()) == gradients.nbytes
    assert sum(row.memory.state.values()) == state
    assert sum(row.fp32_parts.values()) == sum(
        p.numel() for p in trainer.model.parameters() if p.dtype == torch.float32
    )


def test_the_table_of_a_large_model(tmp_path):
    hidden, intermediate, layers, words, keys = 4096, 14336, 32, 128256, 1024
    folder = write_config(
        tmp_path,
        LlamaConfig(
            vocab_size=words,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            architectures=["LlamaForCausalLM"],
        ),
    )
    norms = (2 * layers + 1) * hidden
    matrices = 2 * words * hidden + layers * (2 * hidden * hidden + 2 * keys * hidden + 3 * hidden * intermediate)
    result = run(folder, "--gpus", 8, "--gpu-memory", 80)
    assert result.exit_code == 0, result.output
    assert f"LlamaForCausalLM, {matrices + norms:,} parameters, {norms:,} of which stay in FP32" in result.output
    assert max(map(len, result.output.splitlines()[1:])) <= 80
    wider = run(folder, "--gpus", 8, "--gpu-memory", 80, "--compare")
    assert max(map(len, wider.output.splitlines()[1:])) <= 80
    assert [line.strip() for line in wider.output.splitlines()].count("AdamW") > 0  # the end of a wrapped name
    for name, each in ((FP32_ROW, 16), ("adamw_bf16_split", 10), ("adamw_bf16_kahan", 10), ("adamw_bf16_sr", 8)):
        (line,) = (line for line in result.output.splitlines() if line.strip().startswith(name))
        total = each * matrices + 16 * norms
        expected = [total, total / (matrices + norms) * GIB, total / 8, 80 * GIB - total / 8]
        assert line.split()[-4:] == [f"{value / GIB:,.2f}" for value in expected]


def test_tied_weights_count_once(tmp_path):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=0, num_attention_heads=2, architectures=["LlamaForCausalLM"]
    )
    assert f" {64 * 32 + 32:,} parameters" in run(write_config(tmp_path, config, tie_word_embeddings=True)).output
    assert f" {2 * 64 * 32 + 32:,} parameters" in run(write_config(tmp_path, config, tie_word_embeddings=False)).output


def test_sums_of_micro_batches_are_not_sharded(tmp_path):
    with torch.device("meta"):
        row = low_precision_row(nn.Linear(100, 10), "adamw_bf16_sr", "grad_accumulation=fp32", gpus=4)
    assert row.accumulation == 4 * 1010
    assert row.per_gpu(4) == 8 * 1010 / 4 + 4 * 1010


def test_whole_gradients_stay_where_fsdp2_adds_up_micro_batches():
    with torch.device("meta"):
        model = nn.Linear(100, 10)
        rows = [fp32_row(model, 4, steps) for steps in (1, 2)]
        rows += [low_precision_row(nn.Linear(100, 10), "adamw_bf16_sr", None, 4, steps) for steps in (1, 2)]
    assert [row.per_gpu(4) / 1010 for row in rows] == [16 / 4, 16 / 4 + 4, 8 / 4, 8 / 4 + 2]


def test_frozen_parameters_have_neither_gradient_nor_state():
    with torch.device("meta"):
        models = [nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 10)) for _ in range(2)]
    for model in models:
        model[0].requires_grad_(False)
    rows = [fp32_row(models[0], 1, 1), low_precision_row(models[1], "adamw_bf16_kahan", None)]
    assert [row.total() for row in rows] == [4 * 190 + 12 * 100, 2 * 190 + 8 * 100]


def test_numbers_are_never_cut(tmp_path):
    config = LlamaConfig(hidden_size=65536, num_hidden_layers=126, architectures=["LlamaForCausalLM"])
    output = run(write_config(tmp_path, config), "--gpus", 8, "--gpu-memory", 80, columns=40).output
    assert "…" not in output
    assert len([line for line in output.splitlines() if len(line.split()) > 7 and "," in line]) >= 3


def test_code_next_to_a_configuration_is_not_run(tmp_path):
    config = {"model_type": "foreign", "auto_map": {"AutoConfig": "foreign.Config"}, "architectures": ["Foreign"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "foreign.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    said = refused(tmp_path)
    assert "cannot be loaded: model_type='foreign' is none of transformers'" in said
    assert "the code that its auto_map names is not run" in said
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "config",
    [
        None,
        [],
        [1],
        {},
        {"model_type": "foreign"},
        {"model_type": ["llama"]},
        {"model_type": "foreign", "auto_map": {"AutoConfig": "foreign.Config"}},
        {"model_type": "llama", "num_attention_heads": 0},
    ],
    ids=str,
)
def test_messages_name_the_users_folder_and_no_other(tmp_path, monkeypatch, config):
    """A folder of ours, wherever temporary ones are made, would tell nobody which configuration is meant."""
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "ours"))
    if config is not None:
        (tmp_path / "theirs/config.json").write_text(json.dumps(config))
    said = refused(tmp_path / "theirs").replace(" ", "")  # long lines are broken, paths as well
    assert f"{str(tmp_path / 'theirs')!r}" in said and str(tmp_path / "ours") not in said


def test_a_folder_without_a_configuration(tmp_path):
    assert "there is no config.json in" in refused(tmp_path)


def test_bytes_of_fp32_sums_are_those_held():
    model = nn.ModuleDict({"linear": nn.Linear(5, 3).bfloat16(), "norm": nn.LayerNorm(3)})
    model["frozen"] = nn.Linear(2, 2).bfloat16().requires_grad_(False)
    expected = accumulator_bytes(model.parameters())
    assert expected == 18 * 4 + 6 * 8
    sums = GradientAccumulator(model)
    for _ in range(2):
        hidden: Tensor = model["linear"](torch.ones(1, 5, dtype=torch.bfloat16)).float()
        model["norm"](hidden).square().sum().backward()
    assert sums.nbytes == expected


def test_the_options_are_named_below_the_table(tmp_path):
    folder = write_config(tmp_path / "bert", BertConfig(num_hidden_layers=1, architectures=["BertForMaskedLM"]))
    said = "Rows of adamw_bf16_split, adamw_bf16_kahan, adamw_bf16_sr: with optim_args='state_dtype=int8'."
    assert said in unboxed(run(folder, "--optim-args", "state_dtype=int8"))
    assert "optim_args" not in unboxed(run(folder))


def test_what_cannot_be_estimated_is_said(tmp_path):
    folder = write_config(tmp_path / "bert", BertConfig(num_hidden_layers=1, architectures=["BertForMaskedLM"]))
    assert "unknown: adamw_torch; valid are" in refused(folder, "--optim", "adamw_torch")
    assert "'state_dtpe' is not an argument" in refused(folder, "--optim-args", "state_dtpe=float32")
    assert "no file or folder" in refused(tmp_path / "absent")
    config = BertConfig(architectures=["BertOfTomorrow"])
    assert "class BertOfTomorrow, which is none of" in refused(write_config(tmp_path / "tomorrow", config))
    assert "class Trainer, which is none of" in refused(
        write_config(tmp_path / "odd", config, architectures=["Trainer"])
    )
    assert "class 3, which is none of" in refused(write_config(tmp_path / "odd", config, architectures=[3]))
    for nothing in (None, [], "BertForMaskedLM"):
        assert "has no list of architectures" in refused(write_config(tmp_path / "odd", config, architectures=nothing))
    assert "not of the form key=value" in refused(folder, "--optim-args", "betas=0.9=0.95")
    quantized = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    assert "is quantized" in refused(write_config(tmp_path / "quantized", config, **quantized))


CODE = "somebody/attention-of-their-own"


def uses_no_code(tmp_path, monkeypatch, config) -> None:
    """Assert that a kernel named anywhere in a configuration is not loaded."""
    from transformers.integrations import hub_kernels

    def reached(*args, **kwargs):
        raise AssertionError(args)

    for name in ("load_and_register_attn_kernel", "get_kernel"):
        monkeypatch.setattr(hub_kernels, name, reached)
    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", reached)
    result = run(write_config(tmp_path / config["model_type"], LlamaConfig(), **config))
    assert result.exit_code == 0, result.output


TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize(
    "choice",
    [
        {"_attn_implementation": CODE},
        {"attn_implementation": CODE},
        {"_attn_implementation_internal": CODE},
        {"attn_implementation": {"": CODE}},
        {"_attn_implementation": "kernels-community/flash-attn2"},
        {"_attn_implementation": "flash_attention_2"},
        {"_experts_implementation": CODE},
    ],
    ids=str,
)
def test_code_that_a_configuration_chooses_is_not_loaded(tmp_path, monkeypatch, choice):
    uses_no_code(
        tmp_path, monkeypatch, {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TINY, **choice}
    )


def test_nor_is_that_of_a_part(tmp_path, monkeypatch):
    part = {**TINY, "_attn_implementation": CODE, "max_position_embeddings": 8}
    parts = {"text_config": part, "vision_config": {**part, "image_size": 8, "patch_size": 4}, "projection_dim": 8}
    uses_no_code(tmp_path, monkeypatch, {"model_type": "clip", "architectures": ["CLIPModel"], **parts})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "a weight without elements: model.embed_tokens.weight of shape (64, 0)"),
        ({"vocab_size": 0}, "a weight without elements: model.embed_tokens.weight of shape (0, 32)"),
        ({"hidden_size": 0}, "; it has hidden_size=0"),
        ({"intermediate_size": 0}, "of shape (0, 32); it has intermediate_size=0"),
        ({"num_attention_heads": 0}, "; it has num_attention_heads=0"),
        ({"num_key_value_heads": 0}, "cannot be built from its configuration: integer division"),
        ({"num_key_value_heads": 0}, "; it has num_key_value_heads=0"),
        ({"hidden_size": -32}, "[64, -32]; it has hidden_size=-32"),
        ({"hidden_size": -32}, "cannot be built from its configuration: Trying to create tensor with"),
        ({"hidden_size": 10**30}, "cannot be built from its configuration"),
        ({"hidden_size": 10**400}, "cannot be"),
        ({"vocab_size": 2**62}, "cannot be built from its configuration"),
        ({"hidden_size": "many"}, "cannot be loaded: Validation error for field 'hidden_size'"),
        ({"hidden_size": None}, "cannot be"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1 in the configuration"),
        ({"text_config": {"n_layer": -1}}, "n_layer=-1 in the configuration"),
        ({"depths": [2, -1]}, "depths=-1 in the configuration"),
        ({"vision_feature_layer": -20_000}, "vision_feature_layer=-20000 in the configuration"),
        ({"num_hidden_layers": 10_000_000}, "num_hidden_layers=10000000 in the configuration"),
        ({"num_hidden_layers": float("inf")}, "num_hidden_layers=inf in the configuration"),
        ({"num_labels": 100_000_000}, "is not between 0 and 1,000,000"),
        ({"text_config": {"n_layer": 10**9}}, "n_layer=1000000000 in the configuration"),
        ({"layer_types": {"a": [{"depths": [2, 10**9]}]}}, "depths=1000000000 in the configuration"),
        ({"text_config": {"quantization_config": {"quant_method": "gptq"}}}, "is quantized"),
        ({"model_type": None}, "cannot be loaded"),
    ],
    ids=str,
)
def test_numbers_that_cannot_be_right_are_said_at_once(tmp_path, changes, message):
    start = time.monotonic()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TINY, **changes}
    assert message in refused(write_config(tmp_path / "model", LlamaConfig(), **config))
    assert time.monotonic() - start < 10  # a hundredth of that, on an idle machine


def test_indices_of_layers_may_be_negative():
    empty_model._check_config({"vision_feature_layer": [-2, -5], "vision_feature_layers": [-2, -5]}, "vipllava")
    with pytest.raises(InputError, match="hidden_layers=-2 in the configuration"):
        empty_model._check_config({"hidden_layers": -2}, "any")


NO_DEFAULTS = {"gemma4_assistant": StrictDataclassClassValidationError, "nougat": ValueError}
"""Configurations that cannot be built without arguments, and what transformers raises."""


def test_the_defaults_of_every_configuration_pass():
    names = set(CONFIG_MAPPING)
    for name in names - set(NO_DEFAULTS):
        empty_model._check_config(json.loads(CONFIG_MAPPING[name]().to_json_string(use_diff=False)), name)
    for name in names & set(NO_DEFAULTS):
        with pytest.raises(NO_DEFAULTS[name]):
            CONFIG_MAPPING[name]()


@pytest.mark.parametrize(
    "changes",
    [
        {"backbone": "hf_hub:somebody/model"},
        {"architecture": "hf-hub:somebody/model@main"},
        {"vision_config": {"architecture": "local-dir:/somewhere"}},
        {"parts": [[{"backbone": ["HF-HUB:somebody/model"]}]]},
        {"architecture": "hf-\thub:somebody/model"},
        {"model_args": {"checkpoint_path": "weights.bin"}},
    ],
    ids=str,
)
def test_files_that_timm_would_load_are_refused(tmp_path, changes):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TINY, **changes}
    said = refused(write_config(tmp_path / "model", LlamaConfig(), **config))
    assert "makes timm load files" in said and re.search(r"(backbone|architecture|checkpoint_path)='", said)


def test_a_backbone_of_another_repository_is_not_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *where, **more: pytest.fail(f"asks {where} for files"))
    config = {"model_type": "detr", "architectures": ["DetrForObjectDetection"], "backbone": "microsoft/resnet-50"}
    config |= {"use_timm_backbone": False, "use_pretrained_backbone": True, "backbone_config": None}
    said = refused(write_config(tmp_path / "model", LlamaConfig(), **config))
    assert "backbone='microsoft/resnet-50'" in said and "set its configuration as backbone_config" in said


def test_a_number_of_any_name_cannot_make_modules_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(empty_model, "MAX_MODULES", 1000)
    config = {"architectures": ["SwitchTransformersForConditionalGeneration"], "model_type": "switch_transformers"}
    config |= {"d_model": 8, "num_experts": 10**9, "expert_capacity": 1}
    folder = write_config(tmp_path / "model", LlamaConfig(), **config)
    assert "more than 1,000 modules, the most that estimate supports" in refused(folder)
    assert run(write_config(tmp_path / "next", LlamaConfig(**TINY), architectures=["LlamaForCausalLM"])).exit_code == 0


def tiny(tmp_path, **changes):
    return write_config(tmp_path / "tiny", LlamaConfig(**TINY), architectures=["LlamaForCausalLM"], **changes)


def test_every_gpu_keeps_whole_gradients(tmp_path):
    """With gradient accumulation: 8 GPUs hold 8 times all gradients, and their shards once."""
    folder = tiny(tmp_path)
    settings = ("--gpus", 8, "--gradient-accumulation-steps", 4, "--json")
    fp32, split, *_ = json.loads(run(folder, *settings).output)["rows"]
    count = sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(**TINY)).parameters())
    assert fp32["total"] == 16 * count + 8 * 4 * count == 8 * fp32["per_gpu"]
    assert fp32["gradients"] == 4 * count + 8 * 4 * count
    assert fp32["bytes_per_parameter"] == 16 + 32
    assert split["total"] == 8 * split["per_gpu"] > 10 * count + 8 * 2 * count
    text = run(folder, *settings[:-1]).output
    assert "Weights, grads, state, total and bytes per parameter are those of all 8 GPUs." in text


def test_room_for_activations_is_not_called_free(tmp_path):
    folder = tiny(tmp_path)
    without = " ".join(run(folder, "--gpu-memory", 80).output.split())
    assert "free" not in without and "left for" in without and "activations" in without
    assert "Activations are not included; add --batch-size and --sequence-length." in without
    size = ("--batch-size", 2, "--sequence-length", 128)
    result = run(folder, "--gpu-memory", 80, *size)
    assert "free of" in result.output and "left for" not in result.output
    data = json.loads(run(folder, *size, "--json").output)
    checkpointed = json.loads(run(folder, *size, "--gradient-checkpointing", "--json").output)
    for row, smaller in zip(data["rows"], checkpointed["rows"], strict=True):
        assert row["peak_per_gpu"] > row["per_gpu"] > 0
        assert row["activations_per_gpu"] > smaller["activations_per_gpu"] > 0
    assert any("tokens per GPU in BF16, sdpa attention, without gradient checkpointing" in n for n in data["notes"])
    assert "activations need both" in refused(folder, "--batch-size", 2)
    assert "--gradient-checkpointing needs" in refused(folder, "--gradient-checkpointing")


def test_activations_that_cannot_be_estimated_are_said_to_be_missing(tmp_path):
    config = ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    folder = write_config(tmp_path / "vit", config, architectures=["ViTForImageClassification"])
    output = " ".join(run(folder, "--batch-size", 2, "--sequence-length", 8, "--gpu-memory", 80).output.split())
    assert "Activations in BF16 are not included: ViTForImageClassification takes pixel_values" in output
    assert "left for" in output and "free of" not in output


def test_activations_may_be_missing_in_one_dtype_only(monkeypatch, tmp_path):
    """As in torch 2.13, where routed experts need grouped products that FP32 matrices without values do not have."""

    def without_fp32(self, hidden_states, *routing, forward=MixtralExperts.forward):
        if hidden_states.dtype == torch.float32:
            raise RuntimeError("Expected mat_a to be BFloat16")
        return forward(self, hidden_states, *routing)

    monkeypatch.setattr(MixtralExperts, "forward", without_fp32)
    config = MixtralConfig(**TINY, num_local_experts=2, num_key_value_heads=2)
    folder = write_config(tmp_path / "moe", config, architectures=["MixtralForCausalLM"])
    result = json.loads(run(folder, "--batch-size", 1, "--sequence-length", 16, "--lora", 2, "--json").output)
    fp32, split, *_, lora = result["rows"]
    assert fp32["activations_per_gpu"] is None and lora["activations_per_gpu"] is None
    assert split["activations_per_gpu"] > 0
    missing, counted, of_lora = result["notes"]
    assert missing.startswith(
        "Activations in FP32 are not included: MixtralForCausalLM does not run on tensors without"
    )
    assert counted.startswith("Activations of 1 x 16 tokens per GPU in BF16")
    assert of_lora == "Activations of LoRA are not estimated."


def test_why_parameters_stay_in_fp32_is_said_with_their_number(tmp_path):
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        architectures=["T5ForConditionalGeneration"],
    )
    output = run(write_config(tmp_path / "t5", config)).output
    assert f"{4 * 32 * 48:,} in FP32: wo (named in T5ForConditionalGeneration._keep_in_fp32_modules)" in output
    assert "in FP32: norm (T5LayerNorm)" in output


def test_the_peak_of_muons_step_is_counted(tmp_path):
    rows = json.loads(run(tiny(tmp_path), "--optim", "muon_bf16_kahan", "--json").output)["rows"]
    assert rows[0]["step_per_gpu"] == 0 < rows[1]["step_per_gpu"]
    row = rows[1]
    assert row["total"] == row["weights"] + row["gradients"] + row["state"] + row["step_per_gpu"]


def test_rows_to_compare_with(tmp_path):
    output = run(tiny(tmp_path), "--compare", "--lora", 8).output
    for name in ("BF16 rounded, AdamW", "8-bit AdamW", "Adafactor", "BF16, LoRA rank 8, AdamW"):
        assert name in output
    assert "Adafactor" not in run(tiny(tmp_path)).output


def meta_llama(**changes):
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**{**TINY, **changes}))


def test_adafactors_state_is_the_one_of_transformers():
    from transformers import Adafactor

    model = LlamaForCausalLM(LlamaConfig(**TINY))
    optimizer = Adafactor(model.parameters(), lr=1e-3, scale_parameter=False, relative_step=False)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    held = sum(v.nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.ndim)
    *_, row = compared_rows(meta_llama, 1, 1)
    assert row.name.endswith("Adafactor") and row.memory.state.total() == held


def test_states_of_8_bits():
    """Large matrices: 2.03 bytes per element; embeddings and small tensors: 8."""
    rows = {row.name: row for row in compared_rows(lambda: meta_llama(hidden_size=256), 1, 1)}
    model = meta_llama(hidden_size=256)
    named = {name: param.numel() for name, param in model.named_parameters()}
    large = sum(size for name, size in named.items() if "embed" not in name and size >= 4096)
    small = sum(named.values()) - large
    for name, each in (("FP32, 8-bit AdamW", 8), ("BF16 rounded, 8-bit AdamW", 4)):
        memory = rows[name].memory
        assert memory.state.total() == pytest.approx((2 + 2 * 4 / 256) * large + 8 * small, abs=8 * len(named))
        assert memory.weights.total() + memory.gradients.total() == each * sum(named.values())


def test_lora_has_as_many_parameters_as_with_peft():
    peft = pytest.importorskip("peft")
    row = lora_row(meta_llama(), 4, 1, 1)
    wrapped = peft.get_peft_model(
        LlamaForCausalLM(LlamaConfig(**TINY)), peft.LoraConfig(r=4, target_modules="all-linear")
    )
    trained, every = wrapped.get_nb_trainable_parameters()
    assert row.memory.parameters == every
    assert row.memory.weights.total() == 2 * (every - trained) + 4 * trained
    assert row.memory.gradients.total() == 4 * trained and row.memory.state.total() == 8 * trained
