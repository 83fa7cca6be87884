"""PEFT adapters with our `optim=` strings in the stock Trainer, and in a plain loop: dtypes, learning as in FP32."""

import copy
import json

import pytest
import torch
from transformers import Trainer

import hf_lowprec
from tests.support.chosen_cases import nightly_except
from tests.support.models import tiny_models
from tests.support.training.tiny_trainer import (
    arguments,
    counting_data,
    is_precision,
    losses,
    optimizer_of,
    trained,
)

peft = pytest.importorskip("peft")
loraplus = pytest.importorskip("peft.optimizers").create_loraplus_optimizer

from tests.support.training.peft_adapters import (  # noqa: E402
    ATTENTION,
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
    logged, theirs = ([set(entry) for entry in one.state.log_history] for one in (trainer, reference))
    assert [{name for name in keys if not is_precision(name)} for keys in logged] == theirs
    assert all(("lost_updates" in keys) == ("loss" in keys) for keys in logged)


class TestFP32Adapters:
    """`keep_fp32=lora_*`: adapters in plain FP32 AdamW on a BF16 base, whatever the base came in."""

    @pytest.mark.combinations(1)
    @pytest.mark.parametrize("base", [FP32, BF16])
    @pytest.mark.parametrize("method", ["dora", "embedding"])
    def test_in_trainer(self, tmp_path, capsys, method, base):
        reference = trained(tmp_path, model=adapted(method), optim="adamw_torch")
        trainer = trained(
            tmp_path, model=adapted(method, base), optim="adamw_bf16_kahan", optim_args="keep_fp32=lora_*"
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
        assert "compensation" not in capsys.readouterr().out


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
        report = hf_lowprec.cast_model(model, keep_fp32="lora_*")
        assert {
            name.rpartition("q_proj.")[2] for name in report.boundaries if "layers.0" in name and "q_proj" in name
        } == {
            "lora_A.default",
            "lora_B.default",
        }
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


class TestLoraPlus:
    @pytest.mark.parametrize("rounding", nightly_except({"kahan"}, ["kahan", "stochastic"]))
    def test_its_groups_train(self, tmp_path, rounding):
        """Built before the Trainer casts: parameters keep their identity. `optimizer_cls_and_kwargs` has no groups."""
        rates = {"lr": 1e-3, "loraplus_lr_ratio": 16, "loraplus_lr_embedding": 5e-3, "loraplus_weight_decay": 0.1}

        def run(cls, callbacks=(), **extra):
            model = adapted("embedding")
            optimizer = loraplus(model, cls, **rates, **extra)
            args = arguments(tmp_path, lr_scheduler_type="constant")
            trainer = Trainer(
                model, args, train_dataset=counting_data(), optimizers=(optimizer, None), callbacks=[*callbacks]
            )
            trainer.train()
            return trainer

        start = trainable(adapted("embedding"))
        way = moved(run(torch.optim.AdamW).model, start)
        trainer = run(hf_lowprec.AdamW, [hf_lowprec.LowPrecisionCallback()], rounding=rounding)
        optimizer = optimizer_of(trainer)
        assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 5e-3, 16e-3, 16e-3]
        assert {p.dtype for p in adapters(trainer.model).values()} == {BF16}
        ours = moved(trainer.model, start)
        assert 0.95 < (ours @ way) / (way @ way) < 1.05


class TestSeveralAdapters:
    def test_the_active_one_trains(self):
        model, (_, batch) = adapted("lora"), tiny_models.llama()
        model.add_adapter("second", peft.LoraConfig(**ATTENTION))
        hf_lowprec.cast_model(model)
        model.set_adapter("second")
        model.set_requires_grad("default")
        optimizer = hf_lowprec.AdamW(adapters(model).values(), lr=1e-2)
        for active, resting in (("second", "default"), ("default", "second")):
            model.set_adapter(active)
            before = {name: p.clone() for name, p in model.named_parameters()}
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
            changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
            assert changed and all(f".{active}." in name for name in changed), resting
        with model.disable_adapter():
            plain, _ = tiny_models.llama()
            hf_lowprec.cast_model(plain)
            assert torch.equal(model(**batch).logits, plain(**batch).logits)

    @pytest.mark.parametrize(("keep", "expected"), [((), BF16), (("lora_*",), FP32)])
    def test_one_that_is_added_later_is_cast_as_the_first(self, keep, expected):
        model, (_, batch) = adapted("lora", BF16), tiny_models.llama()
        hf_lowprec.cast_model(model, keep_fp32=keep)
        model.add_adapter("second", peft.LoraConfig(**ATTENTION))
        assert hf_lowprec.cast_model(model).changed
        model.set_adapter("second")
        assert {p.dtype for p in adapters(model).values()} == {expected}
        model(**batch).loss.backward()
        assert {p.grad.dtype for p in adapters(model).values()} == {expected}


@pytest.mark.parametrize("keep", [(), ("lora_*",)])
@pytest.mark.parametrize("dora", [False, True])
def test_convolutions(keep, dora):
    """LoRA on a ViT's patch projection and on its linears, in a plain loop beside FP32."""

    def run(cast):
        model, batch = tiny_models.vit()
        query = (
            "q_proj" if any("q_proj" in name for name, _ in model.named_modules()) else "query"
        )  # in transformers 5.5
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=4, target_modules=["projection", query], modules_to_save=["classifier"], use_dora=dora
        )
        model = peft.get_peft_model(model, config)
        assert any("projection" in name for name in adapters(model)) and any(query in n for n in adapters(model))
        cls = torch.optim.AdamW
        if cast:
            hf_lowprec.cast_model(model, keep_fp32=keep)
            cls = hf_lowprec.AdamW
        optimizer = cls(adapters(model).values(), lr=1e-2, weight_decay=0.0)
        seen = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            seen.append(float(loss.detach()))
        return model, seen

    model, ours = run(True)
    _, theirs = run(False)
    lora = {p.dtype for name, p in adapters(model).items() if "lora_" in name}
    assert lora == ({FP32} if keep else {BF16})
    assert theirs[-1] < theirs[0] - 0.4
    # The loss of two images, falling steeply: 20 BF16 roundings in depth, of a logit of size 3.
    assert max(abs(one - two) for one, two in zip(ours, theirs, strict=True)) < 20**0.5 * 2**-9 * 3
