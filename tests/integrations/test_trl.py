"""TRL's trainers as a user calls them, with `optim=` as the one difference, against the same script in FP32."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification, set_seed

import hf_lowprec
from tests.support.chosen_cases import nightly_except
from tests.support.training.counting_text import preferences, sentences, tokenizer
from tests.support.training.tiny_trainer import arguments, assert_follows, assert_pure_bf16, llama, optimizer_of

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

OURS = ("adamw_bf16_kahan", "adamw_bf16_sr")
DEFAULTS = {"learning_rate": 5e-3, "max_steps": 8, "logging_steps": 2}


@pytest.fixture(scope="module", autouse=True)
def quiet():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model and its tokenizer in a folder, for TRL to load; norms are not 1, so that rounding them shows."""
    folder = tmp_path_factory.mktemp("model")
    model = llama()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.config.update({"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64})
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def config(cls, tmp_path, optim, settings):
    """TRL's defaults mean autocast, which the FP32 run must not have."""
    precision = {"bf16": False} if optim == "adamw_torch" else {}
    return arguments(tmp_path, cls=cls, optim=optim, **{**DEFAULTS, **precision, **settings})


def sft(saved, tmp_path, optim, peft_config=None, resume=None, **settings):
    trainer = trl.SFTTrainer(
        model=saved,
        args=config(trl.SFTConfig, tmp_path, optim, settings),
        train_dataset=datasets.Dataset.from_dict({"text": sentences()}),
        peft_config=peft_config,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def lora():
    """Seeds as well: TRL 1.14, the newest for Python 3.10, draws an adapter's weights before it seeds anything."""
    peft = pytest.importorskip("peft")
    set_seed(42)
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])


SFT = {
    "defaults": {},
    "one_row_of_all": {"padding_free": True, "max_length": None},
    "packed": {"packing": True, "max_length": 32},
    "reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "no_checkpointing": {"gradient_checkpointing": False, "loss_type": "nll"},
}


@pytest.mark.parametrize("setting", nightly_except({"defaults"}, SFT))
def test_sft_of_a_model_by_its_path(saved, tmp_path, setting):
    reference = sft(saved, tmp_path, "adamw_torch", **SFT[setting])
    for optim in OURS if setting == "defaults" else OURS[:1]:
        trainer = sft(saved, tmp_path, optim, **SFT[setting])
        assert_pure_bf16(trainer.model)
        assert_follows(trainer, reference)


def test_sft_of_an_adapter(saved, tmp_path):
    reference = sft(saved, tmp_path, "adamw_torch", peft_config=lora())
    assert_follows(sft(saved, tmp_path, OURS[0], peft_config=lora()), reference)


def test_sft_with_a_head_in_fp32(saved, tmp_path):
    """TRL's loss reads the head's weight by itself, past the boundary of the module."""
    trainer = sft(saved, tmp_path, OURS[0], optim_args="keep_fp32=lm_head")
    assert trainer.model.lm_head.weight.dtype == torch.float32
    assert_follows(trainer, sft(saved, tmp_path, "adamw_torch"))


def dpo(saved, tmp_path, optim, reference=None, peft_config=None, **settings):
    given = None if reference is None else AutoModelForCausalLM.from_pretrained(saved, dtype=reference)
    trainer = trl.DPOTrainer(
        model=saved,
        ref_model=given,
        args=config(trl.DPOConfig, tmp_path, optim, {"logging_steps": 1, **settings}),
        train_dataset=datasets.Dataset.from_list(preferences()),
        peft_config=peft_config,
    )
    trainer.train()
    return trainer


@functools.cache
def fp32_dpo(saved, tmp_path):
    return dpo(saved, tmp_path, "adamw_torch")


DPO = {
    "loaded_by_trl": {},
    "given_in_fp32": {"reference": torch.float32},
    "given_in_bf16": {"reference": torch.bfloat16},
    "head_in_fp32": {"optim_args": "keep_fp32=lm_head"},
    "log_probabilities_before": {"precompute_ref_log_probs": True},
}


@pytest.mark.parametrize("setting", nightly_except({"loaded_by_trl", "given_in_bf16"}, DPO))
def test_dpo_starts_from_a_reference_that_is_the_policy(saved, tmp_path, tmp_path_factory, setting):
    """Equal weights in equal formats give equal log-probabilities, so the first rewards are 0, not nearly."""
    trainer = dpo(saved, tmp_path, OURS[0], **DPO[setting])
    first = trainer.state.log_history[0]
    assert (first["rewards/chosen"], first["rewards/rejected"], first["rewards/margins"]) == (0, 0, 0)
    assert_follows(trainer, fp32_dpo(saved, tmp_path_factory.getbasetemp() / "fp32"))
    if trainer.ref_model is not None:
        policy, reference = (dict(m.named_parameters()) for m in (trainer.model, trainer.ref_model))
        assert {n: p.dtype for n, p in reference.items()} == {n: p.dtype for n, p in policy.items()}
        loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
        for name, parameter in loaded.named_parameters():
            assert torch.equal(reference[name], parameter.to(reference[name].dtype)), name


def test_dpo_of_an_adapter_against_the_model_without_it(saved, tmp_path):
    trainer = dpo(saved, tmp_path, OURS[0], peft_config=lora())
    assert trainer.ref_model is None
    assert trainer.state.log_history[0]["rewards/margins"] == 0
    reference = dpo(saved, tmp_path, "adamw_torch", peft_config=lora())
    # Near log 2 the loss falls by β/2 = 0.05 times the margin: four sums of five log-probabilities, each off by 0.6% of
    # logits of 0.11, which is 3e-3, over the root of 8 rows: 6e-5 at a step. Six seeds showed 1.3e-4 at most, after 8
    # steps that fall by 2e-3; an adapter drawn by another seed shows 4e-3.
    assert_follows(trainer, reference, share=5e-4)


def test_a_reference_with_other_norms_keeps_them(saved, tmp_path):
    """Only what rounding alone tells apart is taken from the policy."""
    reference = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    reference.model.norm.weight.data[3] *= 1.5
    expected = reference.model.norm.weight.detach().float()
    args = config(trl.DPOConfig, tmp_path, OURS[0], {})
    rows = datasets.Dataset.from_list(preferences(8))
    trainer = trl.DPOTrainer(model=saved, ref_model=reference, args=args, train_dataset=rows)
    assert torch.equal(trainer.ref_model.model.norm.weight, expected)


def reward(saved, tmp_path, optim):
    rows = [{k: row["prompt"] + row[k] for k in ("chosen", "rejected")} for row in preferences()]
    args = config(trl.RewardConfig, tmp_path, optim, {"learning_rate": 5e-4})
    return trl.RewardTrainer(model=saved, args=args, train_dataset=datasets.Dataset.from_list(rows))


def kto(saved, tmp_path, optim):
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen" if k % 2 else "rejected"], "label": k % 2 == 1}
        for k, row in enumerate(preferences())
    ]
    args = config(trl.KTOConfig, tmp_path, optim, {})
    return trl.KTOTrainer(model=saved, args=args, train_dataset=datasets.Dataset.from_list(rows))


def orpo(saved, tmp_path, optim):
    experimental = pytest.importorskip("trl.experimental.orpo")
    return experimental.ORPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(saved),
        args=config(experimental.ORPOConfig, tmp_path, optim, {}),
        train_dataset=datasets.Dataset.from_list(preferences()),
        processing_class=AutoTokenizer.from_pretrained(saved),
    )


@pytest.mark.parametrize(
    ("build", "share"),
    [
        # Scores of one BF16 number each, of some 0.1: 2^-9 of them, over a loss of 0.7 that hardly falls.
        (reward, 0.02),
        (kto, 0.005),
        # Over two seeds 1.3e-4 at most; 8e-3 where the logits arrive in BF16.
        pytest.param(orpo, 0.0005, marks=pytest.mark.every_case),
    ],
)
def test_other_losses_on_preferences(saved, tmp_path, build, share):
    trainer, reference = (build(saved, tmp_path, optim) for optim in (OURS[0], "adamw_torch"))
    trainer.train()
    reference.train()
    assert_pure_bf16(trainer.model)
    assert_follows(trainer, reference, share)


def test_grpo_with_a_reference_and_a_judge(saved, tmp_path):
    """The judge has no `lm_head`, which is kept in FP32 in the policy and in the reference."""
    judge = LlamaForSequenceClassification(LlamaConfig(**LlamaConfig.from_pretrained(saved).to_dict(), num_labels=1))
    judge.config._name_or_path = saved
    settings = {"num_generations": 4, "max_completion_length": 4, "beta": 0.1, "logging_steps": 1, "max_steps": 2}
    args = config(trl.GRPOConfig, tmp_path, OURS[0], {**settings, "optim_args": "keep_fp32=lm_head"})
    rows = [{"prompt": row["prompt"]} for row in preferences()]
    data = datasets.Dataset.from_list(rows)
    trainer = trl.GRPOTrainer(model=saved, reward_funcs=judge, args=args, train_dataset=data)
    trainer.train()
    assert isinstance(optimizer_of(trainer), hf_lowprec.AdamW)
    assert trainer.state.log_history[0]["kl"] == 0
    for model in (trainer.model, trainer.ref_model):
        assert model.lm_head.weight.dtype == torch.float32
        assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert_pure_bf16(trainer.reward_funcs[0])


def test_a_head_that_trl_would_upcast_is_refused(saved, tmp_path):
    settings = {"cast_lm_head_to_fp32": True, "num_generations": 4}
    args = config(trl.GRPOConfig, tmp_path, OURS[0], settings)
    data = datasets.Dataset.from_list([{"prompt": row["prompt"]} for row in preferences(8)])
    with pytest.raises(ValueError, match="set optim_args='keep_fp32=lm_head'"):
        trl.GRPOTrainer(model=saved, reward_funcs=lambda completions, **_: [0.0], args=args, train_dataset=data)
