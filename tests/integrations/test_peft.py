"""PEFT adapters with our `optim=` strings in the stock Trainer, and in a plain loop: dtypes, learning as in FP32."""

import copy
import json
import shutil

import pytest
import torch
from transformers import Trainer

import hf_lowprec
from tests.support.chosen_cases import nightly_except
from tests.support.models import tiny_models
from tests.support.training.tiny_trainer import (
    arguments,
    assert_same,
    counting_data,
    is_precision,
    logged,
    losses,
    optimizer_of,
    trained,
)

peft = pytest.importorskip("peft")

from tests.support.training.peft_adapters import (  # noqa: E402
    METHODS,
    adapted,
    frozen_dtypes,
    moved,
    trainable,
)

BF16, FP32 = torch.bfloat16, torch.float32
LOSS_NOISE = 2e-3
"""Ten BF16 operations in depth put √10 · 2^-9/√3 = 0.36% of a logit of size 0.5 on the loss of a token."""


def adapters(model) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.combinations(1)
@pytest.mark.parametrize(("name", "base"), [("adamw_bf16_kahan", FP32), ("adamw_bf16_sr", BF16)])
@pytest.mark.parametrize("method", nightly_except({"lora", "saved_both", "ia3"}, METHODS))
def test_adapters_learn_as_in_fp32(tmp_path, method, name, base):
    """The trained weights end where FP32's do: along FP32's displacement they go the whole way, and not far beside it.

    Kahan from an FP32 base, stochastic rounding from a base that is in BF16 already. Weights that lost their updates
    would have slope 0. Beside it lies the noise: of gradients, whose smallest change sign in Adam's step, and of
    stochastic rounding, √12 steps · 0.4 ulp of weights around one (IA3) against a way of 0.07: 20%. Over the 128
    weights of the smallest method that is 2% of the slope, where 5% is allowed.
    """
    start = trainable(adapted(method))
    reference = trained(tmp_path, model=adapted(method), optim="adamw_torch")
    way = moved(reference.model, start)
    trainer = trained(tmp_path, model=adapted(method, base), optim=name)
    assert {p.dtype for p in adapters(trainer.model).values()} == {BF16}
    assert frozen_dtypes(trainer.model) == {BF16}
    assert {p.dtype for n, p in trainer.model.named_parameters() if "norm" in n} == {FP32}
    assert trainer.get_num_trainable_parameters() == reference.get_num_trainable_parameters() == len(way)
    ours = moved(trainer.model, start)
    assert 0.95 < (ours @ way) / (way @ way) < 1.05
    assert (ours - way).norm() < 0.25 * way.norm()
    for one, two in zip(losses(trainer), losses(reference), strict=True):
        assert abs(one - two) < LOSS_NOISE
    found, theirs = ([set(entry) for entry in one.state.log_history] for one in (trainer, reference))
    assert [{name for name in keys if not is_precision(name)} for keys in found] == theirs
    # With stochastic rounding of a few small weights, chance may make the number meaningless.
    assert all("lost_updates" in keys for keys in found if "loss" in keys) or name.endswith("sr")
    assert all("loss" in keys for keys in found if "lost_updates" in keys)


class TestFP32Adapters:
    """`keep_fp32=lora_*`: adapters in plain FP32 AdamW on a BF16 base, whatever the base came in."""

    @pytest.mark.combinations(1)
    @pytest.mark.parametrize("base", [FP32, BF16])
    @pytest.mark.parametrize("method", ["dora", "embedding"])
    def test_in_trainer(self, tmp_path, capsys, recwarn, method, base):
        reference = trained(tmp_path, model=adapted(method), optim="adamw_torch")
        trainer = trained(
            tmp_path, model=adapted(method, base), optim="adamw_bf16_split", optim_args="keep_fp32=lora_*"
        )
        optimizer = optimizer_of(trainer)
        assert {p.dtype for p in adapters(trainer.model).values()} == {FP32}
        assert frozen_dtypes(trainer.model) == {BF16}
        assert len(optimizer.state) == len(adapters(trainer.model))
        for state in optimizer.state.values():
            assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == FP32
        for one, two in zip(losses(trainer), losses(reference), strict=True):
            assert abs(one - two) < LOSS_NOISE
        # Nothing is rounded, so there is nothing to say of it; NaN would not be JSON.
        assert all("lost_updates" not in entry for entry in trainer.state.log_history)
        assert "NaN" not in json.dumps(trainer.state.log_history)
        assert "remainder" not in capsys.readouterr().out
        assert "float32 parameters" not in "".join(str(warning.message) for warning in recwarn)


class TestDtypesInsidePeft:
    def inside(self, model, batch):
        """Dtypes that LoRA's parts are given and give, by the last two parts of their names."""
        seen = {}
        for name, module in model.named_modules():
            if ".layers.0.self_attn.q_proj" in name:
                place = name.partition("q_proj")[2].lstrip(".") or "layer"
                module.register_forward_hook(
                    lambda m, args, out, place=place: seen.update({place: (args[0].dtype, out.dtype)})
                )
        model(**batch).loss.backward()
        return seen

    @pytest.mark.parametrize("base", [FP32, BF16])
    def test_bf16_adapters_see_bf16_alone(self, base):
        model, (_, batch) = adapted("lora", base), tiny_models.llama()
        hf_lowprec.cast_model(model)
        seen = self.inside(model, batch)
        assert set(seen) == {"layer", "base_layer", "lora_dropout.default", "lora_A.default", "lora_B.default"}
        assert set(seen.values()) == {(BF16, BF16)}

    @pytest.mark.parametrize("casting_disabled", [False, True])
    def test_fp32_adapters_have_boundaries(self, casting_disabled):
        """They convert what comes in, so PEFT's own conversion may be switched off."""
        model, (_, batch) = adapted("lora"), tiny_models.llama()
        hf_lowprec.cast_model(model, keep_fp32="lora_*")
        with peft.helpers.disable_input_dtype_casting(model, casting_disabled):
            seen = self.inside(model, batch)
        assert seen["layer"] == seen["base_layer"] == (BF16, BF16)
        assert seen["lora_A.default"][1] == seen["lora_B.default"][1] == BF16
        assert {p.grad.dtype for p in adapters(model).values()} == {FP32}

    @pytest.mark.parametrize("part", ["lora_magnitude_vector", "lora_A", "lora_B"])
    def test_a_part_alone(self, part):
        """DoRA's magnitude is handed the other parts, and computes with them in their format."""
        model, (_, batch) = adapted("dora"), tiny_models.llama()
        twin = copy.deepcopy(model)
        hf_lowprec.cast_model(model, keep_fp32=part)
        loss = model(**batch).loss
        loss.backward()
        assert {name for name, p in adapters(model).items() if p.grad.dtype == FP32} == {
            name for name in adapters(model) if f".{part}." in name
        }
        assert abs(loss - twin(**batch).loss) < LOSS_NOISE


# Checkpoints: resumed bit for bit, best ones loaded, saved, merged, and their FP32 estimate.


def checkpointed(out, method, optim, resume=None, own_optimizer=False, **settings):
    """A Trainer that has trained nine steps and saved three times; `own_optimizer` is built before it casts."""
    model, options = adapted(method), {}
    if own_optimizer:
        optimizer = hf_lowprec.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        options = {"optimizers": (optimizer, None), "callbacks": [hf_lowprec.LowPrecisionCallback(report=False)]}
    args = arguments(out, optim=optim, max_steps=9, save_strategy="steps", save_steps=3, eval_steps=3, **settings)
    trainer = Trainer(model, args, train_dataset=counting_data(), eval_dataset=counting_data(16), **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def holds_what_trains(trainer) -> bool:
    held = {id(p) for group in optimizer_of(trainer).param_groups for p in group["params"]}
    return held == {id(p) for p in trainer.model.parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("method", "optim", "own_optimizer"),
    [
        pytest.param("dora", "adamw_bf16_kahan", False, marks=pytest.mark.every_case),
        ("saved_both", "adamw_bf16_kahan", False),
        pytest.param("saved_both", "adamw_bf16_sr", False, marks=pytest.mark.every_case),
        ("prefix", "adamw_bf16_sr", False),
        # PEFT loads adapters into new FP32 parameters, which an optimizer that is there would not know.
        ("lora", "adamw_torch", True),
    ],
)
def test_resume_continues_bit_for_bit(tmp_path, method, optim, own_optimizer):
    whole = checkpointed(tmp_path / "whole", method, optim, own_optimizer=own_optimizer)
    (tmp_path / "killed").mkdir()
    shutil.copytree(tmp_path / "whole/checkpoint-3", tmp_path / "killed/checkpoint-3")
    resumed = checkpointed(tmp_path / "killed", method, optim, resume=True, own_optimizer=own_optimizer)
    assert resumed.state.global_step == 9
    assert holds_what_trains(resumed)
    assert_same(resumed, whole)
    saved = [tmp_path / run / "checkpoint-9/adapter_model.safetensors" for run in ("whole", "killed")]
    assert saved[0].read_bytes() == saved[1].read_bytes()


@pytest.mark.parametrize("optim", ["adamw_bf16_kahan", "adamw_bf16_sr"])
def test_the_best_adapters_are_loaded_at_the_end(tmp_path, optim):
    """The highest loss is called the best, so it is the first, and not what is there already."""
    settings = {"eval_strategy": "steps", "load_best_model_at_end": True, "greater_is_better": True}
    trainer = checkpointed(tmp_path, "saved_both", optim, **settings)
    history = logged(trainer, "eval_loss")
    assert history[0] > history[-1] + 0.1
    assert trainer.evaluate()["eval_loss"] == pytest.approx(history[0], abs=1e-6)
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {BF16}
    assert holds_what_trains(trainer)
    full = hf_lowprec.fp32_state_dict(trainer.model, trainer.optimizer)
    for name, parameter in trainer.model.named_parameters():
        # Half a spacing for the compensation of these weights.
        assert torch.allclose(full[name], parameter.float(), rtol=2.0**-8, atol=0.0), name


@pytest.mark.parametrize("method", ["dora", "all_linear"])
def test_merging(tmp_path, method):
    """The merged model computes what the adapted one did, up to the rounding of merged weights to BF16."""
    trainer = checkpointed(tmp_path, method, "adamw_bf16_kahan")
    model = trainer.model.eval()
    _, batch = tiny_models.llama()
    with torch.no_grad():
        expected = model(**batch).logits.float()
        with model.disable_adapter():
            plain = model(**batch).logits.float()
        model.merge_adapter()
        merged = model(**batch).logits.float()
        model.unmerge_adapter()
        unmerged = model(**batch).logits.float()
        final = model.merge_and_unload()
        unloaded = final(**batch).logits.float()
    # Ten BF16 roundings in depth, of activations in the one and also of weights in the other.
    noise = 20**0.5 * 2**-9 * expected.norm()
    assert (expected - plain).norm() > 10 * noise
    for logits in (merged, unmerged, unloaded):
        assert (logits - expected).norm() < noise
    assert not any("lora_" in name for name, _ in final.named_modules())
    assert {p.dtype for n, p in final.named_parameters() if "norm" not in n} == {BF16}
    assert {p.dtype for n, p in final.named_parameters() if "norm" in n} == {FP32}


def test_a_merged_model_is_frozen_and_can_be_thawed(tmp_path):
    """After `merge_and_unload`, the way out is another than for adapters that were loaded frozen."""
    merged = adapted("lora").merge_and_unload()
    with pytest.raises(ValueError, match=r"merge_and_unload\(\), call model\.requires_grad_\(True\)$"):
        trained(tmp_path, model=merged, optim="adamw_bf16_kahan")
    trained(tmp_path, model=merged.requires_grad_(True), optim="adamw_bf16_kahan", max_steps=1)


def test_adapters_that_were_loaded_frozen_are_pointed_out(tmp_path):
    adapted("lora").save_pretrained(tmp_path / "saved")
    base, _ = tiny_models.llama()
    model = peft.PeftModel.from_pretrained(base, tmp_path / "saved")
    trainer = Trainer(model, arguments(tmp_path, optim="adamw_bf16_kahan"), train_dataset=counting_data())
    with pytest.raises(ValueError, match="is_trainable=True"):
        trainer.train()
