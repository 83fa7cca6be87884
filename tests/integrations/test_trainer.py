"""`TrainingArguments(optim=…)` with the stock Trainer: what the string does, and what it leaves alone."""

import pytest
import torch
from torch import nn
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import hf_lowprec
from hf_lowprec.optim import LowPrecisionOptimizer

VOCABULARY, LENGTH = 64, 16


def llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


def counting_data(rows: int = 64) -> list[dict[str, torch.Tensor]]:
    """Sequences that count upwards: learnable within a few steps."""
    start = torch.randint(0, VOCABULARY, (rows, 1), generator=torch.Generator().manual_seed(1))
    tokens = (start + torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens]


def arguments(tmp_path, cls=TrainingArguments, **settings):
    defaults = {
        "output_dir": str(tmp_path),
        "learning_rate": 1e-2,
        "max_steps": 12,
        "per_device_train_batch_size": 8,
        "logging_steps": 4,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return cls(**{**defaults, **settings})


def trained(tmp_path, model=None, trainer_cls=Trainer, **settings):
    options = {
        key: settings.pop(key) for key in ("callbacks", "model_init", "optimizer_cls_and_kwargs") if key in settings
    }
    model = None if "model_init" in options else (model or llama())
    args = arguments(tmp_path, **settings)
    trainer = trainer_cls(
        model=model, args=args, train_dataset=counting_data(), eval_dataset=counting_data(16), **options
    )
    trainer.train()
    return trainer


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def optimizer_of(trainer) -> torch.optim.Optimizer:
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def assert_pure_bf16(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        expected = torch.float32 if "norm" in name else torch.bfloat16
        assert parameter.dtype == expected, name


SETTINGS = {
    "plain": {},
    "gradient_accumulation": {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2},
    "clipping": {"max_grad_norm": 0.05},
    "warmup_and_cosine": {"warmup_steps": 4, "lr_scheduler_type": "cosine"},
    "weight_decay": {"weight_decay": 0.1},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "bf16_by_habit": {"bf16": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 4},
    "torch_compile": {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 4},
    "label_smoothing": {"label_smoothing_factor": 0.1},
}


@pytest.mark.parametrize("name", ["adamw_bf16_kahan", "adamw_bf16_sr"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_training_follows_fp32(tmp_path, setting, name):
    """The same loss as FP32 AdamW under the same settings.

    BF16 activations carry a relative error of 2^-9 per operation; through about ten operations in depth and with errors
    that are independent that is √10 · 2^-9 ≈ 0.6% of a logit of size one. Loss curves that fall from 4.2 towards 1 in a
    dozen steps amplify it by their slope; 2.5% of the starting loss bounds both.
    """
    settings = SETTINGS[setting]
    reference = trained(tmp_path, optim="adamw_torch", **{k: v for k, v in settings.items() if k != "bf16"})
    trainer = trained(tmp_path, optim=name, **settings)
    assert_pure_bf16(trainer.model)
    assert isinstance(optimizer_of(trainer), hf_lowprec.AdamW)
    assert trainer.accelerator.mixed_precision == "no"
    assert len(losses(trainer)) == len(losses(reference)) > 0
    for ours, theirs in zip(losses(trainer), losses(reference), strict=True):
        assert abs(ours - theirs) < 0.025 * losses(reference)[0]
    if len(losses(trainer)) > 1:
        assert losses(trainer)[-1] < losses(trainer)[0]


@pytest.mark.parametrize("name", hf_lowprec.OPTIMIZER_NAMES)
def test_every_name_reaches_its_optimizer(tmp_path, name):
    trainer = trained(tmp_path, optim=name, max_steps=2, weight_decay=0.1, seed=7)
    algorithm, mode = name.split("_bf16_")
    optimizer = optimizer_of(trainer)
    assert type(optimizer).__name__.lower() == algorithm
    decayed, undecayed = optimizer.param_groups
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.0)
    assert {group["rounding"] for group in optimizer.param_groups} == {{"kahan": "kahan", "sr": "stochastic"}[mode]}
    assert {group["seed"] for group in optimizer.param_groups} == {7}
    assert all("norm" in name for name, p in trainer.model.named_parameters() if p.dtype == torch.float32)


def test_names_on_the_command_line():
    parser = HfArgumentParser(TrainingArguments)
    for name in hf_lowprec.OPTIMIZER_NAMES:
        (args,) = parser.parse_args_into_dataclasses(["--output_dir", "out", "--optim", name])
        assert args.optim == name
    with pytest.raises((SystemExit, ValueError)):
        parser.parse_args_into_dataclasses(["--output_dir", "out", "--optim", "adamw_bf16_kahn"])


def test_optim_args_reach_every_keyword(tmp_path):
    words = (
        "betas=0.8|0.95, eps=1e-6, amsgrad=True, maximize=false, rounding=nearest, state_rounding=nearest, "
        "state_dtype=exp_avg:float32|exp_avg_sq:bf16, seed=11, backend=eager, weight_decay=0.3, keep_fp32=lm_head|*.mlp"
    )
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", optim_args=words, max_steps=1)
    optimizer = optimizer_of(trainer)
    group = optimizer.param_groups[0]
    assert optimizer.backend == "eager"
    assert group["betas"] == (0.8, 0.95)
    assert (group["eps"], group["amsgrad"], group["maximize"], group["seed"]) == (1e-6, True, False, 11)
    assert (group["rounding"], group["state_rounding"]) == ("nearest", "nearest")
    assert group["state_dtype"] == {"exp_avg": torch.float32, "exp_avg_sq": torch.bfloat16}
    assert optimizer.defaults["weight_decay"] == 0.3
    assert trainer.model.lm_head.weight.dtype == torch.float32
    assert trainer.model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    assert trainer.model.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("momentun=0.9", r"'momentun' is not an argument of .*did you mean 'momentum'"),
        ("rounding=kahn", r"rounding='kahn'.*'kahan', 'stochastic', 'nearest'"),
        ("nesterov=maybe", r"nesterov='maybe' does not parse; give True or False"),
        ("momentum=fast", r"momentum='fast' does not parse; give a number"),
        ("state_dtype=float8", r"state_dtype='float8' does not parse; give bfloat16"),
        ("momentum", r"'momentum' is not of the form key=value"),
        ("seed=1,seed=2", r"names 'seed' twice"),
        ("momentum=-1", r"momentum=-1.0 is invalid; it must be a number >= 0"),
    ],
)
def test_bad_optim_args_name_what_is_wrong(tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        trained(tmp_path, optim="sgd_bf16_kahan", optim_args=words)


def test_unknown_optim_args_fail_before_anything_is_cast(tmp_path):
    model = llama()
    with pytest.raises(ValueError, match="'beta'"):
        Trainer(model=model, args=arguments(tmp_path, optim="adamw_bf16_kahan", optim_args="beta=0.9"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_fp16_is_refused(tmp_path):
    args = arguments(tmp_path, optim="adamw_bf16_kahan")
    args.mixed_precision = "fp16"  # as `accelerate launch --mixed_precision fp16` sets it
    with pytest.raises(ValueError, match="fp16"):
        Trainer(model=llama(), args=args, train_dataset=counting_data())


def test_model_init_is_cast_each_time(tmp_path):
    built = []

    def model_init():
        built.append(llama())
        return built[-1]

    trainer = trained(tmp_path, model_init=model_init, optim="adamw_bf16_kahan", max_steps=2)
    assert len(built) == 2
    for model in built:
        assert_pure_bf16(model)
    assert trainer.model is built[-1]


def test_best_model_is_loaded_at_the_end(tmp_path):
    trainer = trained(
        tmp_path,
        optim="adamw_bf16_kahan",
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=4,
        save_steps=4,
        load_best_model_at_end=True,
        learning_rate=3e-2,
    )
    history = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(history), abs=1e-6)
    assert_pure_bf16(trainer.model)


def test_seq2seq_trainer(tmp_path):
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    )
    args = arguments(tmp_path, cls=Seq2SeqTrainingArguments, optim="adamw_bf16_sr", predict_with_generate=True)
    trainer = Seq2SeqTrainer(model=model, args=args, train_dataset=counting_data(), eval_dataset=counting_data(16))
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]
    assert model.shared.weight.dtype == torch.bfloat16
    assert trainer.predict(counting_data(8), max_length=4).predictions.shape[0] == 8


def test_the_callback_alone_trains_bf16_with_any_optimizer(tmp_path, capsys):
    callback = hf_lowprec.LowPrecisionCallback(keep_fp32=["lm_head"])
    trainer = trained(tmp_path, callbacks=[callback], optim="adamw_torch", bf16=True, max_steps=2)
    assert trainer.model.lm_head.weight.dtype == torch.float32
    assert trainer.model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert trainer.accelerator.mixed_precision == "no"
    assert "not of hf_lowprec" in capsys.readouterr().out


def test_the_users_callback_replaces_ours(tmp_path, capsys):
    callback = hf_lowprec.LowPrecisionCallback(report=False, log_lost_updates=False)
    trainer = trained(tmp_path, callbacks=[callback], optim="adamw_bf16_kahan", max_steps=4)
    ours = [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, hf_lowprec.LowPrecisionCallback)]
    assert ours == [callback]
    assert "hf_lowprec" not in capsys.readouterr().out
    assert all("lost_updates" not in entry for entry in trainer.state.log_history)


def test_a_callback_class_is_accepted(tmp_path):
    trainer = trained(tmp_path, callbacks=[hf_lowprec.LowPrecisionCallback], optim="adamw_bf16_kahan", max_steps=1)
    assert_pure_bf16(trainer.model)


def test_a_callback_added_too_late_says_so(tmp_path):
    trainer = Trainer(model=llama(), args=arguments(tmp_path), train_dataset=counting_data())
    trainer.add_callback(hf_lowprec.LowPrecisionCallback())
    with pytest.raises(RuntimeError, match=r"pass it as Trainer\(callbacks="):
        trainer.train()


def test_optimizer_factory_feeds_trainer(tmp_path):
    pair = hf_lowprec.optimizer_factory("adamw_bf16_sr", lr=5e-3, seed=3)
    trainer = trained(
        tmp_path, optimizer_cls_and_kwargs=pair, callbacks=[hf_lowprec.LowPrecisionCallback()], max_steps=2
    )
    optimizer = optimizer_of(trainer)
    assert isinstance(optimizer, hf_lowprec.AdamW)
    assert optimizer.defaults["lr"] == 5e-3
    with pytest.raises(ValueError, match="'adamw_bf16_kahn' is unknown"):
        hf_lowprec.optimizer_factory("adamw_bf16_kahn")
    with pytest.raises(ValueError, match="'sed' is not an argument"):
        hf_lowprec.optimizer_factory("adamw_bf16_sr", sed=1)


def test_one_report_and_the_lost_updates_in_the_log(tmp_path, capsys):
    trainer = trained(tmp_path, optim="adamw_bf16_kahan", optim_args="rounding=nearest", learning_rate=1e-6)
    out = capsys.readouterr().out
    assert out.count("hf_lowprec: bfloat16 training of LlamaForCausalLM") == 1
    assert "weights nearest" in out
    lost = [entry["lost_updates"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(lost) == 3
    # |w| is about 0.02 (initializer_range), where half an ulp is 2^-14 ≈ 6e-5 and the update is at most 1e-6: only
    # the weights below 1e-6 · 2^8 = 2.6e-4, one in a hundred, can take it.
    assert all(0.97 < share <= 1 for share in lost)


def test_two_trainers_in_one_process(tmp_path):
    first = trained(tmp_path / "a", optim="adamw_bf16_kahan")
    plain = trained(tmp_path / "b", optim="adamw_torch")
    second = trained(tmp_path / "c", optim="adamw_bf16_kahan")
    assert {p.dtype for p in plain.model.parameters()} == {torch.float32}
    assert not isinstance(optimizer_of(plain), LowPrecisionOptimizer)
    for (name, ours), theirs in zip(first.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_registering_again_changes_nothing():
    before = (Trainer.__init__, Trainer.train, list(type(TrainingArguments(output_dir="out").optim)))
    hf_lowprec.register()
    assert (Trainer.__init__, Trainer.train, list(type(TrainingArguments(output_dir="out").optim))) == before


def test_fp32_state_dict_is_weight_plus_compensation(tmp_path):
    trainer = trained(tmp_path, optim="adamw_bf16_kahan")
    full = hf_lowprec.fp32_state_dict(trainer.model, trainer.optimizer)
    optimizer = optimizer_of(trainer)
    assert set(full) == set(trainer.model.state_dict())
    for name, parameter in trainer.model.named_parameters():
        expected = parameter.double()
        if parameter.dtype == torch.bfloat16:
            expected = expected + optimizer.state[parameter]["compensation"].double()
            assert not torch.equal(full[name], parameter.float())
        assert full[name].dtype == torch.float32
        assert torch.equal(full[name], expected.float())
