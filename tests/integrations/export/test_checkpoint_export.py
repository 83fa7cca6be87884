"""`export_checkpoint`: checkpoints of every kind, what is copied besides weights, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import hf_lowprec
from hf_lowprec.integrations.export.parameter_names import PARAMETERS_NAME
from tests.integrations.export.test_save_pretrained import MODELS, SAVING, assert_same_folders
from tests.support.training.counting_text import tokenizer
from tests.support.training.tiny_trainer import LENGTH, llama, trained

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A Trainer that has just saved a checkpoint, and the checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    trainer = trained(folder, optim="adamw_bf16_kahan", **SAVING)
    return trainer, folder / "checkpoint-3"


@pytest.fixture
def checkpoint(saved, tmp_path) -> Path:
    """A copy of the checkpoint, without a manifest, so that it can be changed."""
    copy = tmp_path / "checkpoint-3"
    shutil.copytree(saved[1], copy)
    (copy / "hf_lowprec_manifest.json").unlink()
    return copy


def refused(checkpoint, out, **options) -> str:
    with pytest.raises(ValueError) as error:
        hf_lowprec.export_checkpoint(checkpoint, out, **options)
    assert not out.exists()
    return str(error.value)


def accelerate_state(folder: Path, model: nn.Module, steps: int = 2, **options):
    """A model after some steps with accelerate, its optimizer, and its saved state."""
    accelerator = Accelerator(cpu=True)
    hf_lowprec.cast_model(model)
    optimizer = hf_lowprec.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, **options)
    hf_lowprec.prepare_accelerator(accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(steps):
        accelerator.backward(model(torch.arange(LENGTH)[None], labels=torch.arange(LENGTH)[None]).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder))
    return model, optimizer


@pytest.mark.parametrize("name", MODELS)
def test_states_of_accelerate(tmp_path, name):
    model, optimizer = accelerate_state(tmp_path / "state", MODELS[name](), rounding="kahan")
    hf_lowprec.save_pretrained(model, optimizer, tmp_path / "live")
    assert hf_lowprec.export_checkpoint(tmp_path / "state", tmp_path / "out").refined > 0
    assert_same_folders(tmp_path / "out", tmp_path / "live")


def test_two_optimizers_for_one_model(tmp_path):
    accelerator, model = Accelerator(cpu=True), llama().to(BF16)
    params = [*model.parameters()]
    optimizers = [hf_lowprec.AdamW(part, lr=1e-3, rounding="kahan") for part in (params[:4], params[4:])]
    hf_lowprec.prepare_accelerator(accelerator)
    model, *optimizers = accelerator.prepare(model, *optimizers)
    accelerator.backward(model(torch.arange(LENGTH)[None], labels=torch.arange(LENGTH)[None]).loss)
    for optimizer in optimizers:
        optimizer.step()
    accelerator.save_state(str(tmp_path / "state"))
    assert hf_lowprec.export_checkpoint(tmp_path / "state", tmp_path / "out").refined == len(params)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for optimizer, part in zip(optimizers, ([*params[:4]], [*params[4:]]), strict=True):
        names = {name for name, param in model.named_parameters() if any(param is one for one in part)}
        with pytest.warns(RuntimeWarning, match="stored 16-bit values"):
            expected = hf_lowprec.fp32_state_dict(model, optimizer)
        assert all(torch.equal(found[name], expected[name]) for name in names)


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"optim": "adamw_bf16_kahan", "save_only_model": True}, "no optimizer state (save_only_model=True?)"),
        ({"optim": "adamw_torch"}, "another library"),
        ({"optim": "adamw_bf16_sr"}, "not 'kahan'"),
    ],
)
def test_without_compensation_the_weights_are_exported_as_stored(tmp_path, settings, note):
    trainer = trained(tmp_path, **settings, **SAVING)
    report = hf_lowprec.export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "out")
    assert report.refined == 0 and note in str(report)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], value.float()) for name, value in trainer.model.state_dict().items())


def test_a_model_folder_is_exported(tmp_path):
    llama().to(BF16).save_pretrained(tmp_path / "model")
    assert "no optimizer state" in str(hf_lowprec.export_checkpoint(tmp_path / "model", tmp_path / "out"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == FP32


def test_adapters_that_cannot_be_named_do_not_stop_a_checkpoint(tmp_path, monkeypatch, caplog):
    peft = pytest.importorskip("peft")
    from tests.support.training.peft_adapters import adapted

    original = peft.get_peft_model_state_dict

    def fails(model, state_dict=None, **options):
        raise KeyError("a new method")

    monkeypatch.setattr(peft, "get_peft_model_state_dict", fails)
    trained(tmp_path, model=adapted("lora"), optim="adamw_bf16_kahan", **SAVING)
    assert "the adapters' names cannot be saved" in caplog.text
    monkeypatch.setattr(peft, "get_peft_model_state_dict", original)
    assert "has a compensation for base_model" in refused(tmp_path / "checkpoint-3", tmp_path / "out")


def rewritten(name: str, change):
    """A function that changes the JSON of a file in a checkpoint."""

    def rewrite(checkpoint: Path) -> None:
        content = json.loads((checkpoint / name).read_text())
        (checkpoint / name).write_text(json.dumps(change(content)))

    return rewrite


def of_another_model(checkpoint: Path) -> None:
    saved = torch.load(checkpoint / "optimizer.pt")
    saved["state"][0]["compensation"] = torch.zeros(3, 3, dtype=BF16)
    torch.save(saved, checkpoint / "optimizer.pt")


def without_a_weight(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})


def without_a_name(names):
    names["optimizers"][0][0].pop()
    return names


REFUSALS = [
    (lambda checkpoint: (checkpoint / PARAMETERS_NAME).unlink(), f"has compensations but no {PARAMETERS_NAME}"),
    (rewritten(PARAMETERS_NAME, without_a_name), "they are from different checkpoints"),
    (rewritten(PARAMETERS_NAME, lambda names: {}), "is not a list"),
    (rewritten(PARAMETERS_NAME, lambda names: {"format": 9}), "upgrade hf_lowprec"),
    (
        rewritten(PARAMETERS_NAME, lambda names: json.loads(json.dumps(names).replace("lm_head.", "value_head."))),
        "a compensation for value_head.weight",
    ),
    (of_another_model, "its compensation has (3, 3)"),
    (without_a_weight, "has no weights for model.norm.weight of shape (32,)"),
    (lambda checkpoint: (checkpoint / "model.safetensors").unlink(), "has no weights that can be read"),
    (lambda checkpoint: (checkpoint / "config.json").unlink(), "as model_folder (--model-folder)"),
    *(
        (rewritten("config.json", lambda config, change=change: config | change), said)
        for change, said in (
            ({"architectures": ["MyModel"]}, "which transformers does not have; call hf_lowprec.save_pretrained"),
            ({"architectures": None}, "has no list of architectures"),
            ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, "'mine' is not a model type of"),
            ({"quantization_config": {"quant_method": "gptq"}}, "are quantized (gptq)"),
        )
    ),
]


@pytest.mark.parametrize(("change", "said"), REFUSALS, ids=[said for _, said in REFUSALS])
def test_what_is_refused(checkpoint, tmp_path, change, said):
    change(checkpoint)
    assert said in refused(checkpoint, tmp_path / "out")


def test_a_missing_file(saved, tmp_path):
    shutil.copytree(saved[1], tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3/optimizer.pt").unlink()
    message = refused(tmp_path / "checkpoint-3", tmp_path / "out")
    assert "is not a complete checkpoint: optimizer.pt is missing" in message and message.startswith("checkpoint=")


def test_an_unfinished_state_of_accelerate(tmp_path):
    accelerate_state(tmp_path / "state", llama(), rounding="kahan")
    (tmp_path / "state/random_states_0.pkl").unlink()
    assert "is not finished" in refused(tmp_path / "state", tmp_path / "out")


def test_folders(saved, tmp_path):
    assert "there is no checkpoint" in refused(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(ValueError, match="is not an empty folder; export to a new one"):
        hf_lowprec.export_checkpoint(saved[1], saved[1])
    assert "pass one of checkpoint-3" in refused(saved[1].parent, tmp_path / "out")
    assert "dtype='float16' is not supported" in refused(saved[1], tmp_path / "out", dtype="float16")


def test_a_model_folder_replaces_what_the_checkpoint_lacks(checkpoint, tmp_path, saved):
    for name in ("config.json", "generation_config.json"):
        (checkpoint / name).unlink()
    llama().save_pretrained(tmp_path / "start")
    tokenizer().save_pretrained(tmp_path / "start")
    hf_lowprec.export_checkpoint(checkpoint, tmp_path / "out", model_folder=tmp_path / "start")
    expected = hf_lowprec.fp32_state_dict(saved[0].model, saved[0].optimizer)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert (tmp_path / "out/tokenizer.json").exists()


def test_weights_and_checkpoints_of_the_model_folder_are_not_copied(checkpoint, tmp_path):
    start = tmp_path / "start"
    llama().save_pretrained(start)
    shutil.copytree(checkpoint, start / "checkpoint-500")
    for name in ("consolidated.safetensors", "consolidated.00.pth", "tf_model.h5", "flax_model.msgpack"):
        (start / name).write_bytes(b"older weights")
    hf_lowprec.export_checkpoint(checkpoint, tmp_path / "out", model_folder=start)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"config.json", "generation_config.json", "model.safetensors"}


def test_a_folder_inside_the_checkpoint(checkpoint):
    hf_lowprec.export_checkpoint(checkpoint, checkpoint / "fp32")
    written = {path.name for path in (checkpoint / "fp32").iterdir()}
    assert written == {"config.json", "generation_config.json", "model.safetensors"}
