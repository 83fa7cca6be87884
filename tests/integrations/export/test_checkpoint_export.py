"""`export_checkpoint`: the same folder as `save_pretrained`, from files alone; and the checkpoints that it refuses."""

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
from tests.integrations.export.test_save_pretrained import LENGTH, METHODS, MODELS, llama
from tests.support.chosen_cases import nightly_except
from tests.support.training.counting_text import tokenizer
from tests.support.training.tiny_trainer import arguments, counting_data, trained

BF16, FP32 = torch.bfloat16, torch.float32
SAVING = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3}


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


def assert_same_folders(found: Path, expected: Path) -> None:
    for path in expected.iterdir():
        assert (found / path.name).read_bytes() == path.read_bytes(), path.name
    assert {path.name for path in found.iterdir()} == {path.name for path in expected.iterdir()}


@pytest.mark.combinations(1)
@pytest.mark.parametrize(
    ("optim", "dtype"),
    [("adamw_bf16_kahan", "float32"), ("adamw_bf16_kahan", "bfloat16"), ("adamw_bf16_split", "float32")],
)
@pytest.mark.parametrize("name", MODELS)
def test_command_and_function_agree(tmp_path, name, optim, dtype):
    """On the weights, on every byte of the configuration, and on tokenizer and generation config."""
    trainer = trained(tmp_path, model=MODELS[name](), optim=optim, processing_class=tokenizer(), **SAVING)
    options = {"dtype": dtype, "max_shard_size": "40KB"}
    hf_lowprec.save_pretrained(
        trainer.model, trainer.optimizer, tmp_path / "live", processing_class=tokenizer(), **options
    )
    report = hf_lowprec.export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "out", **options)
    assert_same_folders(tmp_path / "out", tmp_path / "live")
    trainable = {id(param): param for param in trainer.model.parameters()}.values()
    assert report.refined == sum(param.dtype == BF16 for param in trainable)
    assert report.tensors == len(trainable)
    assert report.notes == []


@pytest.mark.parametrize("method", nightly_except({"saved_both", "tokens", "prefix"}, METHODS))
def test_adapters(tmp_path, method):
    pytest.importorskip("peft")
    from tests.support.training.peft_adapters import adapted

    trainer = trained(tmp_path, model=adapted(method), optim="adamw_bf16_kahan", **SAVING)
    hf_lowprec.save_pretrained(trainer.model, trainer.optimizer, tmp_path / "live")
    report = hf_lowprec.export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "out")
    assert report.refined > 0
    assert_same_folders(tmp_path / "out", tmp_path / "live")


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


def test_two_adapters(tmp_path):
    peft = pytest.importorskip("peft")
    from tests.support.models import tiny_models
    from tests.support.training.peft_adapters import METHODS, adapted

    model = adapted("lora")
    model.add_adapter("second", METHODS["rslora"])
    model.set_adapter("second")
    trainer = trained(tmp_path, model=model, optim="adamw_bf16_kahan", **SAVING)
    hf_lowprec.save_pretrained(trainer.model, trainer.optimizer, tmp_path / "live")
    assert hf_lowprec.export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "out").refined == 8
    for part in ("adapter_model.safetensors", "second/adapter_model.safetensors"):
        assert (tmp_path / "out" / part).read_bytes() == (tmp_path / "live" / part).read_bytes()
    loaded = peft.PeftModel.from_pretrained(tiny_models.llama()[0], tmp_path / "out/second")
    assert any("lora_A" in name for name, _ in loaded.named_parameters())


def test_prompts_of_an_encoder_need_the_script(tmp_path):
    pytest.importorskip("peft")
    from tests.support.training.peft_adapters import adapted

    trained(tmp_path, model=adapted("p_tuning"), optim="adamw_bf16_kahan", **SAVING)
    message = refused(tmp_path / "checkpoint-3", tmp_path / "out")
    assert "prompt_encoder.default" in message and "call hf_lowprec.save_pretrained(model, optimizer, …)" in message


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


class TestWithoutCompensation:
    """The states that are there are exported, and the report says so."""

    def test_only_the_model_was_saved(self, tmp_path):
        trainer = trained(tmp_path, optim="adamw_bf16_kahan", save_only_model=True, **SAVING)
        report = hf_lowprec.export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "out")
        assert report.refined == 0 and "save_only_model" in str(report)
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
        assert all(torch.equal(found[name], value.float()) for name, value in trainer.model.state_dict().items())

    @pytest.mark.parametrize(("optim", "note"), [("adamw_torch", "another library"), ("adamw_bf16_sr", "not 'kahan'")])
    def test_the_optimizer_has_none(self, tmp_path, optim, note):
        trainer = trained(tmp_path, optim=optim, **SAVING)
        report = hf_lowprec.export_checkpoint(tmp_path / "checkpoint-3", tmp_path / "out")
        assert report.refined == 0 and note in str(report)
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
        assert all(torch.equal(found[name], value.float()) for name, value in trainer.model.state_dict().items())

    def test_a_model_folder(self, tmp_path):
        llama().to(BF16).save_pretrained(tmp_path / "model")
        assert "no optimizer state" in str(hf_lowprec.export_checkpoint(tmp_path / "model", tmp_path / "out"))
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == FP32


class TestRefusals:
    def test_a_missing_file(self, saved, tmp_path):
        shutil.copytree(saved[1], tmp_path / "checkpoint-3")
        (tmp_path / "checkpoint-3/optimizer.pt").unlink()
        message = refused(tmp_path / "checkpoint-3", tmp_path / "out")
        assert "is not a whole checkpoint: optimizer.pt is missing" in message and message.startswith("checkpoint=")

    def test_an_unfinished_state_of_accelerate(self, tmp_path):
        accelerate_state(tmp_path / "state", llama(), rounding="kahan")
        (tmp_path / "state/random_states_0.pkl").unlink()
        assert "was not finished" in refused(tmp_path / "state", tmp_path / "out")

    def test_no_names(self, checkpoint, tmp_path):
        (checkpoint / PARAMETERS_NAME).unlink()
        message = refused(checkpoint, tmp_path / "out")
        assert f"has compensations but no {PARAMETERS_NAME}" in message and "Resume the run from it" in message

    def test_names_of_another_checkpoint(self, checkpoint, tmp_path):
        names = json.loads((checkpoint / PARAMETERS_NAME).read_text())
        names["optimizers"][0][0].pop()
        (checkpoint / PARAMETERS_NAME).write_text(json.dumps(names))
        assert "they are from different checkpoints" in refused(checkpoint, tmp_path / "out")

    @pytest.mark.parametrize(("content", "said"), [("{}", "is not a list"), ('{"format": 9}', "upgrade hf_lowprec")])
    def test_names_that_cannot_be_read(self, checkpoint, tmp_path, content, said):
        (checkpoint / PARAMETERS_NAME).write_text(content)
        assert said in refused(checkpoint, tmp_path / "out")

    def test_an_optimizer_of_another_model(self, checkpoint, tmp_path):
        saved = torch.load(checkpoint / "optimizer.pt")
        saved["state"][0]["compensation"] = torch.zeros(3, 3, dtype=BF16)
        torch.save(saved, checkpoint / "optimizer.pt")
        assert "its compensation has (3, 3)" in refused(checkpoint, tmp_path / "out")

    def test_a_parameter_that_the_model_does_not_have(self, checkpoint, tmp_path):
        text = (checkpoint / PARAMETERS_NAME).read_text()
        (checkpoint / PARAMETERS_NAME).write_text(text.replace("lm_head.weight", "value_head.weight"))
        assert "a compensation for value_head.weight" in refused(checkpoint, tmp_path / "out")

    def test_a_missing_weight(self, checkpoint, tmp_path):
        weights = load_file(checkpoint / "model.safetensors")
        del weights["model.norm.weight"]
        save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
        assert "has no weights for model.norm.weight of shape (32,)" in refused(checkpoint, tmp_path / "out")

    def test_no_weights(self, tmp_path):
        (tmp_path / "empty").mkdir()
        assert "has no weights that can be read" in refused(tmp_path / "empty", tmp_path / "out")

    def test_no_config(self, checkpoint, tmp_path):
        (checkpoint / "config.json").unlink()
        assert "as model_folder (--model-folder)" in refused(checkpoint, tmp_path / "out")

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"architectures": ["MyModel"]}, "none of transformers' models; call hf_lowprec.save_pretrained"),
            ({"architectures": None}, "has no list of architectures"),
            ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, "model_type='mine' is none of"),
            ({"quantization_config": {"quant_method": "gptq"}}, r"are quantized (gptq)"),
        ],
    )
    def test_a_config_of_another_kind(self, checkpoint, tmp_path, change, said):
        config = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").write_text(json.dumps(config | change))
        assert said in refused(checkpoint, tmp_path / "out")

    def test_code_that_a_config_names_is_not_fetched(self, checkpoint, tmp_path):
        config = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").write_text(json.dumps(config | {"_attn_implementation": "someone/kernel"}))
        assert hf_lowprec.export_checkpoint(checkpoint, tmp_path / "out").tensors == 21

    def test_folders(self, saved, tmp_path):
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


def test_trainer_is_not_needed_to_know_the_format(tmp_path):
    """A resumed run writes the names again, with those of its own parameters."""
    trained(tmp_path, optim="adamw_bf16_kahan", **SAVING)
    args = arguments(tmp_path, optim="adamw_bf16_kahan", **SAVING | {"max_steps": 6})
    from transformers import Trainer

    trainer = Trainer(llama(), args, train_dataset=counting_data())
    trainer.train(resume_from_checkpoint=True)
    expected = hf_lowprec.fp32_state_dict(trainer.model, trainer.optimizer)
    hf_lowprec.export_checkpoint(tmp_path / "checkpoint-6", tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
