"""`TrainingArguments(optim=…)`: what the string does in Trainer and its subclasses, and what it leaves alone."""

import functools
import gc
import re
import weakref

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import (
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import hf_lowprec
from hf_lowprec.casting.earlier_casts import cast_dtypes
from hf_lowprec.integrations.transformers.trainer import _EVERY_TRAINER, _OUR_TRAINERS, wrap_trainer
from tests.support.chosen_cases import nightly_except
from tests.support.training.tiny_trainer import (
    VOCABULARY,
    arguments,
    assert_follows,
    assert_pure_bf16,
    assert_same_weights,
    counting_data,
    llama,
    logged,
    losses,
    optimizer_of,
    trained,
)

BF16, FP32 = torch.bfloat16, torch.float32
OURS = "adamw_bf16_kahan"
SETTINGS = {
    "plain": {},
    "gradient_accumulation": {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2, "max_steps": 4},
    "clipping": {"max_grad_norm": 0.05},
    "warmup_and_cosine": {"warmup_steps": 4, "lr_scheduler_type": "cosine"},
    "weight_decay": {"weight_decay": 0.1},
    "bf16_by_habit": {"bf16": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 4},
    "label_smoothing": {"label_smoothing_factor": 0.1},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "not_reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "neftune": {"neftune_noise_alpha": 5.0},
    "use_cache": {"use_cache": True},
    "evaluated_first": {"eval_on_start": True},
}
SHORT = ("plain", "gradient_accumulation", "clipping", "bf16_by_habit", "evaluation", "reentrant", "neftune")


@pytest.mark.combinations(1)
@pytest.mark.parametrize("name", ["adamw_bf16_kahan", "adamw_bf16_sr"])
@pytest.mark.parametrize("setting", nightly_except(SHORT, SETTINGS))
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
    assert_follows(trainer, reference, 0.025)
    assert len(losses(trainer)) == 1 or losses(trainer)[-1] < losses(trainer)[0]


@pytest.mark.parametrize("optim_args", ["", "state_dtype=int8", "gradient_release=True"])
def test_a_trainer_is_freed_with_its_last_reference(tmp_path, optim_args):
    """As with torch's optimizers: no model waits on a device for Python's garbage collector."""
    settings = {"optim_args": optim_args, "max_steps": 1, "max_grad_norm": 0, "save_strategy": "steps", "save_steps": 1}
    trainer = trained(tmp_path, optim="adamw_bf16_split", **settings)
    references = [weakref.ref(it) for it in (trainer, trainer.model, trainer.accelerator, optimizer_of(trainer))]
    gc.collect()
    gc.disable()
    try:
        del trainer
        assert [it() for it in references] == [None] * 4
    finally:
        gc.enable()


def test_model_init_is_cast_each_time(tmp_path):
    built = []

    def model_init():
        built.append(llama())
        return built[-1]

    trainer = trained(tmp_path, model_init=model_init, optim=OURS, max_steps=2)
    assert len(built) == 2
    for model in built:
        assert_pure_bf16(model)
    assert trainer.model is built[-1]


def test_registering_again_changes_nothing():
    before = (Trainer.__init__, Trainer.train, list(type(TrainingArguments(output_dir="out").optim)))
    hf_lowprec.register()
    assert (Trainer.__init__, Trainer.train, list(type(TrainingArguments(output_dir="out").optim))) == before


# What is the user's stays the user's.


def test_the_users_arguments_and_callbacks_are_not_changed(tmp_path):
    args = arguments(tmp_path, optim=OURS, bf16=True, max_steps=1)
    callbacks = [hf_lowprec.LowPrecisionCallback]
    trainer = Trainer(model=llama(), args=args, train_dataset=counting_data(), callbacks=callbacks)
    assert trainer.accelerator.mixed_precision == "no"
    assert args.mixed_precision == "bf16", "the next trainer of these arguments may want it"
    assert Accelerator(mixed_precision="bf16").mixed_precision == "bf16"
    assert callbacks == [hf_lowprec.LowPrecisionCallback]
    Trainer(model=llama(), args=args, train_dataset=counting_data(), callbacks=tuple(callbacks))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, 0.0), ({"weight_decay": 0.2}, 0.2), ({"optim_args": "weight_decay=0.1"}, 0.1)],
)
def test_weight_decay_is_that_of_the_training_arguments(tmp_path, settings, expected):
    """Trainer writes its own, which is 0 unless it is set, over the algorithm's default and any keyword argument."""
    for name in ("adamw_bf16_kahan", "muon_bf16_sr"):
        groups = optimizer_of(trained(tmp_path, optim=name, max_steps=1, **settings)).param_groups
        assert {group["weight_decay"] for group in groups} == {expected, 0.0}
    given = hf_lowprec.optimizer_factory(OURS, lr=1e-3, weight_decay=0.3)
    trainer = trained(tmp_path, optim=OURS, optimizer_cls_and_kwargs=given, max_steps=1, **settings)
    assert {group["weight_decay"] for group in optimizer_of(trainer).param_groups} == {expected, 0.0}


def test_a_learning_rate_in_optim_args_is_trainers(tmp_path):
    args = TrainingArguments(str(tmp_path), optim=OURS, optim_args="lr=0.125", use_cpu=True, report_to=[])
    trainer = Trainer(llama(), args)
    assert trainer.create_optimizer().param_groups[0]["lr"] == args.learning_rate == 0.125


# What is refused, before anything is changed.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"optim_args": "weight_decay=0.1", "weight_decay": 0.2},
            r"weight_decay=0\.2 and weight_decay=0\.1 in optim_args differ; remove one of them",
        ),
        ({"optim_args": "lr=0.1", "learning_rate": 1e-3}, r"learning_rate=0\.001 and lr=0\.1 in optim_args differ"),
        ({"fp16": True}, "fp16=True is incompatible with pure BF16 training"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True would cast the model"),
        ({"fp16_full_eval": True}, "fp16_full_eval=True would cast the model"),
        ({"optim_target_modules": ["mlp"]}, re.escape("optim_target_modules=['mlp'] selects modules for GaLore")),
    ],
)
def test_arguments_that_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        trained(tmp_path, optim=OURS, **settings)


def test_fp16_is_refused(tmp_path):
    args = arguments(tmp_path, optim=OURS)
    args.mixed_precision = "fp16"  # as `accelerate launch --mixed_precision fp16` sets it
    with pytest.raises(ValueError, match="fp16"):
        Trainer(model=llama(), args=args, train_dataset=counting_data())


def test_an_optimizer_chosen_too_late_is_refused(tmp_path):
    trainer = Trainer(model=llama(), args=arguments(tmp_path), train_dataset=counting_data())
    trainer.args.optim = OURS
    with pytest.raises(ValueError, match="before the Trainer is built"):
        trainer.train()


WRONG = [
    ({"callbacks": 3}, TypeError),
    ({"no_argument": 1}, TypeError),
    ({"model_init": llama}, ValueError),
    ({"train_dataset": iter(())}, ValueError),
    ({"optimizers": (None, None, None)}, ValueError),
    ({"eval_dataset": None}, ValueError),
]


@pytest.mark.parametrize(
    ("optim", "wrong", "error"),
    [(optim, *wrong) for optim in ("adamw_torch", "adamw_bf16_split") for wrong in WRONG],
)
def test_what_is_refused_leaves_the_model_as_it_was(tmp_path, optim, wrong, error):
    model = llama()
    args = arguments(tmp_path, optim=optim, max_steps=-1, eval_strategy="steps")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error):
        Trainer(model, args, **{"train_dataset": counting_data(), "eval_dataset": counting_data(), **wrong})
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# When a Trainer casts its model: while it is built, and before it builds its optimizer; not when asked for one.


def test_asking_for_an_optimizer_does_not_cast(tmp_path):
    model = llama().to(BF16)
    Trainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, optim=OURS), model)
    assert not cast_dtypes(model)
    assert {param.dtype for param in model.parameters()} == {BF16}, "norms too"


class Halved(Trainer):
    """The head learns at half the rate; how the optimizer is built is up to subclasses."""

    def groups(self):
        named = list(self.model.named_parameters())
        head = [p for name, p in named if "lm_head" in name]
        return [{"params": [p for name, p in named if "lm_head" not in name]}, {"params": head, "lr": 5e-3}]


class AsksTrainer(Halved):
    """Never calls the method that it overrides."""

    def create_optimizer(self, model=None):
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(self.args, model or self.model)
        self.optimizer = cls(self.groups(), **kwargs)
        return self.optimizer


@pytest.mark.parametrize("trainer_cls", [Trainer, AsksTrainer])
@pytest.mark.parametrize("pass_model", [False, True])
def test_what_was_added_since_is_cast_before_the_optimizer_is_built(tmp_path, trainer_cls, pass_model):
    model = llama()
    model.kept = nn.Linear(4, 4)
    args = arguments(tmp_path, optim=OURS, optim_args="keep_fp32=kept")
    trainer = trainer_cls(model, args, train_dataset=counting_data())
    trainer.model.adapter, trainer.model.part = nn.Linear(4, 4), nn.Module()
    trainer.model.part.kept = nn.Linear(4, 4)
    trainer.create_optimizer(*[trainer.model] * pass_model)
    assert {param.dtype for param in trainer.model.adapter.parameters()} == {BF16}
    assert {param.dtype for param in trainer.model.kept.parameters()} == {FP32}
    assert {param.dtype for param in trainer.model.part.parameters()} == {FP32}, "optim_args hold for it as well"
    held = {id(param) for group in trainer.optimizer.param_groups for param in group["params"]}
    assert held == {id(param) for param in trainer.model.parameters()}


def test_an_optimizer_that_exists_leaves_the_model_as_it_is(tmp_path):
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = Trainer(model, arguments(tmp_path, optim=OURS), None, counting_data(), optimizers=(optimizer, None))
    trainer.model.adapter = nn.Linear(4, 4)
    assert trainer.create_optimizer() is optimizer
    assert trainer.model.adapter.weight.dtype == FP32


def test_a_16_bit_model_is_cast_also_if_its_optimizer_is_chosen_late(tmp_path):
    trainer = Trainer(llama().to(BF16), arguments(tmp_path), train_dataset=counting_data())
    trainer.args.optim = OURS
    trainer.create_optimizer()
    assert_pure_bf16(trainer.model)


# Other trainers, and subclasses that build their own optimizer.


def test_seq2seq_generates_between_steps(tmp_path):
    def run(optim):
        torch.manual_seed(0)
        size = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
        config = T5Config(**size, vocab_size=VOCABULARY, decoder_start_token_id=0)
        counts = []
        settings = {"learning_rate": 3e-3, "predict_with_generate": True, "eval_strategy": "steps", "eval_steps": 6}
        settings["generation_config"] = GenerationConfig(max_new_tokens=4, decoder_start_token_id=0)
        trainer = Seq2SeqTrainer(
            model=T5ForConditionalGeneration(config),
            args=arguments(tmp_path, cls=Seq2SeqTrainingArguments, optim=optim, **settings),
            train_dataset=counting_data(),
            eval_dataset=counting_data(16),
            compute_metrics=lambda found: {"evaluations": float(counts.append(len(found.predictions)) or len(counts))},
        )
        trainer.train()
        assert counts == [16, 16]
        return trainer

    reference, trainer = run("adamw_torch"), run(OURS)
    assert_follows(trainer, reference)
    assert logged(trainer, "eval_evaluations") == logged(reference, "eval_evaluations") == [1, 2]
    assert logged(trainer, "eval_loss")[-1] == pytest.approx(logged(reference, "eval_loss")[-1], rel=0.005)


class BuildsOurs(Halved):
    def create_optimizer(self, model=None):
        cls = torch.optim.AdamW if self.args.optim == "adamw_torch" else hf_lowprec.AdamW
        self.optimizer = cls(self.groups(), lr=1e-2, weight_decay=0.0)
        return self.optimizer


class AddsToSuper(Trainer):
    """A temperature of its own, FP32, beside the model's parameters."""

    def create_optimizer(self, *args, **kwargs):
        super().create_optimizer(*args, **kwargs)
        self.temperature = nn.Parameter(torch.ones(()))
        self.optimizer.add_param_group({"params": [self.temperature], "lr": 1e-1})
        return self.optimizer

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        assert logits.dtype == torch.float32
        loss = nn.functional.cross_entropy((logits * self.temperature)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, {"logits": logits}) if return_outputs else loss


@pytest.mark.parametrize("trainer_cls", [AsksTrainer, BuildsOurs, AddsToSuper])
def test_subclasses_with_their_own_optimizer_and_loss(tmp_path, trainer_cls):
    reference = trained(tmp_path, trainer_cls=trainer_cls, optim="adamw_torch")
    trainer = trained(tmp_path, trainer_cls=trainer_cls, optim="adamw_bf16_sr")
    assert isinstance(optimizer_of(trainer), hf_lowprec.AdamW)
    assert_pure_bf16(trainer.model)
    assert_follows(trainer, reference)
    groups = [[group["initial_lr"] for group in optimizer_of(t).param_groups] for t in (trainer, reference)]
    assert groups[0] == groups[1]
    if trainer_cls is AddsToSuper:
        assert trainer.temperature.item() == pytest.approx(reference.temperature.item(), rel=0.005)


class BuildsTorchs(Halved):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.AdamW(self.groups(), lr=1e-2)
        return self.optimizer


@pytest.mark.parametrize("trainer_cls", [BuildsTorchs, Trainer])
def test_an_optimizer_that_is_not_the_one_asked_for_is_refused(tmp_path, trainer_cls):
    model = llama()
    before = [parameter.detach().to(BF16) for parameter in model.parameters()]
    options = {"optimizers": (torch.optim.AdamW(model.parameters()), None)} if trainer_cls is Trainer else {}
    trainer = trainer_cls(model, arguments(tmp_path, optim=OURS), train_dataset=counting_data(), **options)
    asked = r"optim='adamw_bf16_kahan' was requested, but AdamW from optimizers= or create_optimizer"
    with pytest.raises(ValueError, match=asked):
        trainer.train()
    assert all(torch.equal(p.to(BF16), old) for p, old in zip(model.parameters(), before, strict=True))


def test_an_optimizer_made_by_a_partial_method(tmp_path):
    class Partial(Trainer):
        def make(self, model=None, momentum=0.0):
            made.append(momentum)
            return super().create_optimizer()

        create_optimizer = functools.partialmethod(make, momentum=0.5)

    made = []
    trained(tmp_path, trainer_cls=Partial, optim="adamw_bf16_split", max_steps=1)
    assert made == [0.5]


# Trainers whose methods other libraries have replaced by ones with other signatures.


def patched(original, wraps: bool):
    def method(*args, **kwargs):
        return original(*args, **kwargs)

    return functools.wraps(original)(method) if wraps else method


@pytest.fixture(params=[(before, wraps) for before in (True, False) for wraps in (True, False)])
def patched_trainer(monkeypatch, request):
    """Trainer, of which another library has patched every method that we wrap, before or after our import."""
    before, wraps = request.param
    for name in [*_EVERY_TRAINER, *_OUR_TRAINERS]:
        method = vars(Trainer)[name]
        is_static = isinstance(method, staticmethod)
        function = method.__func__ if is_static else method
        replacement = patched(function.__wrapped__ if before else function, wraps)
        monkeypatch.setattr(Trainer, name, staticmethod(replacement) if is_static else replacement)
    if before:
        monkeypatch.delattr(Trainer, "_hf_lowprec_wrapped")
    wrap_trainer()


@pytest.mark.parametrize("by_position", [True, False])
def test_patched_methods(patched_trainer, tmp_path, by_position):
    def trained(output_dir, optim, resume=None):
        args = arguments(output_dir, optim=optim, max_steps=2, save_strategy="steps", save_steps=1)
        if by_position:
            trainer = Trainer(llama(), args, None, counting_data())
            trainer.train(resume)
        else:
            trainer = Trainer(args=args, train_dataset=counting_data(), model=llama())
            trainer.train(resume_from_checkpoint=resume)
        return trainer

    stock = trained(tmp_path / "stock", "adamw_torch")
    assert {param.dtype for param in stock.model.parameters()} == {torch.float32}
    ours = trained(tmp_path, "adamw_bf16_split")
    assert_pure_bf16(ours.model)
    assert_same_weights(trained(tmp_path, "adamw_bf16_split", resume=str(tmp_path / "checkpoint-1")), ours)
