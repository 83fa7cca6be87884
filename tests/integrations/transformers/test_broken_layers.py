"""A model that holds a layer which torch computes wrongly here: Trainer says so, by name, and with what helps."""

import logging
import re

import pytest
import torch
from transformers import HubertConfig, HubertForSequenceClassification, Trainer

from tests.support.broken_kernels.planted import break_function, off_by
from tests.support.training.tiny_trainer import arguments, trained

pytestmark = pytest.mark.usefixtures("own_kernels")
NAME = "hubert.encoder.pos_conv_embed.conv"


def hubert() -> HubertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    features = {"conv_dim": [16] * 3, "conv_stride": [5, 2, 2], "conv_kernel": [10, 3, 3], "num_feat_extract_layers": 3}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    return HubertForSequenceClassification(HubertConfig(**sizes, **features, **positions, mask_time_prob=0.0))


def sounds() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        {"input_values": torch.randn(640, generator=draw), "labels": torch.tensor(number % 2)} for number in range(8)
    ]


def warnings_of_training(tmp_path, caplog, **settings) -> list[str]:
    caplog.clear()
    trainer = Trainer(
        hubert(), arguments(tmp_path, optim="adamw_bf16_kahan", max_steps=1, **settings), train_dataset=sounds()
    )
    with caplog.at_level(logging.WARNING, "hf_lowprec"):
        trainer.train()
    return [record.getMessage() for record in caplog.records if "wrongly" in record.getMessage()]


def test_a_broken_layer_is_named_once_and_what_helps_helps(tmp_path, caplog, monkeypatch):
    assert warnings_of_training(tmp_path, caplog) == []
    break_function(monkeypatch, "conv1d", off_by(1.1), only=lambda values: values[1].shape == (32, 8, 16))
    (said,) = warnings_of_training(tmp_path, caplog, optim_args="keep_fp32=classifier")
    assert f"in bfloat16 on cpu: {NAME}, Conv1d(32, 32, kernel_size=(16,)" in said and "output off by" in said
    options = re.search(r'optim_args="([^"]*)"', said)[1]
    assert options == f"keep_fp32=classifier|{NAME}"
    assert warnings_of_training(tmp_path, caplog, optim_args=options) == []


def test_a_broken_gradient_is_named(tmp_path, caplog, monkeypatch):
    break_function(monkeypatch, "conv1d", off_by(1.1), "weight", only=lambda values: values[1].shape[-1] == 3)
    (said,) = warnings_of_training(tmp_path, caplog)
    assert "hubert.feature_extractor.conv_layers.1.conv and 1 like it" in said and "grad_weight off by" in said
    assert "keep_fp32=hubert.feature_extractor.conv_layers.1.conv|" in said


def test_a_model_without_convolutions_is_not_probed(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_lowprec.monitor.broken_convolutions.probe_layer", None)
    trained(tmp_path, optim="adamw_bf16_kahan", max_steps=1)


def test_a_probe_that_fails_stops_no_training(tmp_path, monkeypatch):
    def unexpected(*args, **kwargs):
        raise TypeError("conv1d of another library takes no such argument")

    monkeypatch.setattr("hf_lowprec.monitor.broken_convolutions.probe_layer", unexpected)
    trainer = Trainer(hubert(), arguments(tmp_path, optim="adamw_bf16_kahan", max_steps=1), train_dataset=sounds())
    assert trainer.train().global_step == 1
