"""A model is built from its config.json alone, and nothing that the file names is run or fetched."""

import json
import re
import socket

import pytest
from transformers import LlamaConfig

from hf_lowprec.integrations.checkpoint_files.input_files import InputError
from hf_lowprec.integrations.transformers import named_models
from hf_lowprec.integrations.transformers.named_models import build_empty_model, load_config

TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TINY}
CODE = "somebody/attention-of-their-own"


def build(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return build_empty_model(*load_config(str(folder)))


def refused(folder, config) -> str:
    with pytest.raises(InputError) as refusal:
        build(folder, config)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "model_type=None is not a model type of transformers"),
        ({"model_type": "foreign"}, "model_type='foreign' is not a model type of transformers"),
        ({"num_attention_heads": 0}, "cannot be loaded"),
        ({"hidden_size": "many"}, "cannot be loaded: Validation error for field 'hidden_size'"),
        ({"architectures": None}, "has no list of architectures"),
        ({"architectures": "LlamaForCausalLM"}, "has no list of architectures"),
        ({"architectures": ["Trainer"]}, "class Trainer, which transformers does not have"),
        ({"architectures": [3]}, "class 3, which transformers does not have"),
        ({"vocab_size": 0}, "a weight without elements: model.embed_tokens.weight of shape (0, 32)"),
        ({"hidden_size": -32}, "cannot be built from its configuration: Trying to create tensor with"),
        ({"vocab_size": 2**62}, "cannot be built from its configuration"),
        ({"text_config": {"quantization_config": {"quant_method": "gptq"}}}, "is quantized"),
    ],
    ids=str,
)
def test_why_there_is_no_model_is_said(tmp_path, changes, message):
    assert message in refused(tmp_path, LLAMA | changes)


@pytest.mark.parametrize("content", [[], [1], {}], ids=str)
def test_messages_name_the_folder(tmp_path, content):
    assert f"the configuration of {str(tmp_path)!r} cannot be loaded" in refused(tmp_path, content)
    (tmp_path / "config.json").unlink()
    with pytest.raises(InputError, match=re.escape(f"there is no config.json in {str(tmp_path)!r}")):
        load_config(str(tmp_path))
    with pytest.raises(InputError, match="no file or folder"):
        load_config(str(tmp_path / "absent"))


def test_code_next_to_a_configuration_is_not_run(tmp_path):
    (tmp_path / "foreign.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = {"model_type": "foreign", "auto_map": {"AutoConfig": "foreign.Config"}, "architectures": ["Foreign"]}
    assert "the code that its auto_map names is not run" in refused(tmp_path, config)
    assert not (tmp_path / "ran").exists()


PART = {**TINY, "_attn_implementation": CODE, "max_position_embeddings": 8}
PARTS = {"text_config": PART, "vision_config": {**PART, "image_size": 8, "patch_size": 4}, "projection_dim": 8}


@pytest.mark.parametrize(
    "config",
    [
        {**LLAMA, "_attn_implementation": CODE},
        {**LLAMA, "attn_implementation": {"": CODE}},
        {**LLAMA, "_attn_implementation_internal": CODE},
        {**LLAMA, "_attn_implementation": "flash_attention_2"},
        {**LLAMA, "_experts_implementation": CODE},
        {"model_type": "clip", "architectures": ["CLIPModel"], **PARTS},
    ],
    ids=str,
)
def test_code_that_a_configuration_chooses_is_not_loaded(tmp_path, monkeypatch, config):
    from transformers.integrations import hub_kernels

    def reached(*args, **kwargs):
        raise AssertionError(args)

    for name in ("load_and_register_attn_kernel", "get_kernel"):
        monkeypatch.setattr(hub_kernels, name, reached)
    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", reached)
    assert build(tmp_path, config).config._attn_implementation == "sdpa"


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
    assert re.search(
        r"(backbone|architecture|checkpoint_path)='.*make timm load files", refused(tmp_path, LLAMA | changes)
    )


def test_a_backbone_of_another_repository_is_not_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *where, **more: pytest.fail(f"asks {where} for files"))
    config = {"model_type": "detr", "architectures": ["DetrForObjectDetection"], "backbone": "microsoft/resnet-50"}
    config |= {"use_timm_backbone": False, "use_pretrained_backbone": True, "backbone_config": None}
    said = refused(tmp_path, LlamaConfig().to_dict() | config)
    assert "backbone='microsoft/resnet-50'" in said and "set its configuration as backbone_config" in said


def test_no_number_makes_modules_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(named_models, "MAX_MODULES", 1000)
    experts = {"architectures": ["SwitchTransformersForConditionalGeneration"], "model_type": "switch_transformers"}
    experts |= {"d_model": 8, "num_experts": 10**9, "expert_capacity": 1}
    assert "more than 1,000 modules" in refused(tmp_path, LlamaConfig().to_dict() | experts)
    assert "more than 1,000 modules" in refused(tmp_path, LLAMA | {"num_hidden_layers": 10**5})
    assert sum(1 for _ in build(tmp_path, LLAMA).modules()) < 100
