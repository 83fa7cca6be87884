"""Models of the shelf whose inputs are FP32: vision and speech, trained and generating."""

import pytest
import torch

from hf_lowprec.casting import cast_model
from tests.support.broken_layers import check_around_broken_layers
from tests.support.models import tiny_models
from tests.support.models.inspection import BF16, FP32
from tests.support.models.training_check import check_training
from tests.support.models.vision_and_speech_models import MODELS, whisper


class TestArchitectures:
    @pytest.mark.parametrize("name", MODELS)
    def test_trains_on_fp32_inputs(self, name: str) -> None:
        check_around_broken_layers(name, MODELS[name], check_training)

    def test_generation_calls_the_encoder_alone(self) -> None:
        model, batch = whisper()
        report = cast_model(model.eval())
        assert {"", "model", "model.encoder", "model.decoder"} <= set(report.inputs)
        features = batch["input_features"]
        for given in (features, features.to(BF16)):
            hidden = model.get_encoder()(given).last_hidden_state
            assert hidden.dtype == BF16
        tokens = [model.generate(given, max_new_tokens=5, do_sample=False) for given in (features, features.to(BF16))]
        assert torch.equal(*tokens) and tokens[0].shape[0] == 2

    def test_embeddings_as_inputs(self) -> None:
        model, batch = tiny_models.llama()
        tokens = batch.pop("input_ids")
        cast_model(model)
        embeddings = model.get_input_embeddings()(tokens).detach().float().requires_grad_()
        loss = model(inputs_embeds=embeddings, **batch).loss
        assert torch.equal(loss, model(input_ids=tokens, **batch).loss)
        loss.backward()
        assert embeddings.grad is not None and embeddings.grad.dtype == FP32 and embeddings.grad.any()

    def test_additive_mask_of_the_lowest_number(self) -> None:
        model, batch = tiny_models.llama(attention="eager")  # its softmax makes NaN of a row of -inf
        cast_model(model)
        length = batch["input_ids"].shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        causal[3] = False  # a row without anything to attend to, as of padding on the left
        lowest = torch.finfo(FP32).min
        assert torch.tensor(lowest).to(BF16).isinf()
        mask = torch.zeros(2, 1, length, length).masked_fill(~causal, lowest)
        logits = model(batch["input_ids"], attention_mask=mask).logits
        assert logits.isfinite().all()
        assert torch.equal(logits, model(batch["input_ids"], mask).logits)
