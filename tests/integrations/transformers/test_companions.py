"""What users combine with `optim=`: every setting gives FP32's losses under the same setting, and resumes as ever."""

import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from transformers import Trainer, TrainerCallback

import hf_lowprec
from hf_lowprec.integrations.transformers.training_arguments import check_liger
from tests.support.training.fp32_weights_at_start import Beginning
from tests.support.training.liger_patches import liger_patches_undone
from tests.support.training.tiny_trainer import (
    arguments,
    assert_follows,
    assert_pure_bf16,
    assert_same,
    counting_data,
    llama,
    logged,
    losses,
    optimizer_of,
    trained,
)

OURS = "adamw_bf16_kahan"


def dropping_llama():
    model = llama()
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    return model


def test_metrics_see_fp32_predictions_inputs_and_losses(tmp_path):
    def run(optim):
        def metrics(found):
            assert found.predictions.dtype == "float32"
            assert found.inputs.shape == (16, 16)
            return {"right": float((found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:]).mean())}

        settings = {"include_for_metrics": ["inputs", "loss"], "eval_strategy": "steps", "eval_steps": 6}
        args = arguments(tmp_path, optim=optim, **settings)
        data = {"train_dataset": counting_data(), "eval_dataset": counting_data(16)}
        trainer = Trainer(model=llama(), args=args, compute_metrics=metrics, **data)
        trainer.train()
        return trainer

    trainer, reference = run(OURS), run("adamw_torch")
    assert_follows(trainer, reference)
    assert logged(trainer, "eval_right") == pytest.approx(logged(reference, "eval_right"), abs=0.02)


class OutOfMemory(Trainer):
    """Has memory for seven sequences at a time, and sees it in the second micro-batch."""

    calls = 0

    def training_step(self, model, inputs, *args, **kwargs):
        self.calls += 1
        if self.calls > 1 and len(inputs["input_ids"]) > 7:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(model, inputs, *args, **kwargs)


def test_a_batch_size_that_is_found_by_trying(tmp_path):
    """Sums of the first try are forgotten."""
    settings = {"trainer_cls": OutOfMemory, "auto_find_batch_size": True, "gradient_accumulation_steps": 2}
    reference = trained(tmp_path, optim="adamw_torch", **settings)
    trainer = trained(tmp_path, optim=OURS, optim_args="grad_accumulation=fp32", **settings)
    assert trainer._train_batch_size == reference._train_batch_size == 7
    assert trainer.accelerator.mixed_precision == "no"
    assert_follows(trainer, reference)


def has_compiler() -> bool:
    try:
        return shutil.which(get_cpp_compiler()) is not None
    except Exception:  # torch raises a private class
        return False


@pytest.mark.every_case
@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="inductor needs a C++ compiler")
def test_compiled_by_inductor(tmp_path):
    """Against FP32 as it is: inductor keeps more digits between operations than BF16 has. One layer is enough."""

    def run(optim, **more):
        model = llama()
        model.model.layers = model.model.layers[:1]
        return trained(tmp_path, model=model, optim=optim, max_steps=3, logging_steps=1, **more)

    assert_follows(run(OURS, torch_compile=True), run("adamw_torch"))


def test_resuming_is_bit_exact_with_all_that_draws_random_numbers(tmp_path):
    """Noise, dropout and the order of batches come from random states that checkpoints hold."""
    settings = {"neftune_noise_alpha": 5.0, "gradient_checkpointing": True}
    settings |= {"train_sampling_strategy": "group_by_length"}

    def run(resume=None):
        saves = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
        return trained(tmp_path, model=dropping_llama(), optim=OURS, resume=resume, max_steps=4, **saves, **settings)

    whole = run()
    resumed = run(str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == losses(whole)
    assert_same(resumed, whole)


def test_weights_saved_alone_are_trained_on(tmp_path):
    """`save_only_model` leaves out the optimizer: a fresh one goes on from the weights, FP32 norms included."""
    saves = {"optim": OURS, "save_strategy": "steps", "save_steps": 4, "save_only_model": True}
    whole, beginning = trained(tmp_path, max_steps=4, **saves), Beginning()
    assert not list(tmp_path.glob("checkpoint-4/optimizer*"))
    trained(tmp_path, resume=str(tmp_path / "checkpoint-4"), max_steps=5, callbacks=[beginning], **saves)
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(beginning.estimates[name], parameter.float()), name


class Watch(TrainerCallback):
    """Keeps the exact norm of the gradients as Trainer hands them to the optimizer."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack(squares).sum().sqrt()))


class Poison(TrainerCallback):
    """Puts an infinity into a gradient before the optimizer's third step, before Trainer asks for the norm."""

    def __init__(self):
        self.backwards = 0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        def hook(grad):
            self.backwards += 1
            return torch.full_like(grad, math.inf) if self.backwards == 3 else grad

        next(model.parameters()).register_hook(hook)


def test_the_norm_before_clipping_is_reported_and_the_step_clips(tmp_path):
    """Trainer's own argument gives the same bits as the optimizer's, and no gradient is touched."""
    settings = {"optim": OURS, "logging_steps": 1, "gradient_accumulation_steps": 2, "max_steps": 4}
    trainers = []
    for argument in ({"optim_args": "max_grad_norm=0.05"}, {"max_grad_norm": 0.05}):
        watch = Watch()
        trainers.append(trained(tmp_path, callbacks=[watch], **argument, **settings))
        assert min(watch.norms) > 0.05  # Trainer itself clipped nothing
        # Squares are summed in FP64 and the norm rounded to FP32 once.
        assert logged(trainers[-1], "grad_norm") == pytest.approx(watch.norms, rel=2**-24)
        assert logged(trainers[-1], "skipped_steps") == []
    assert trainers[0].args.max_grad_norm == optimizer_of(trainers[0]).max_grad_norm == 0.05
    assert_same(*trainers)


@pytest.mark.parametrize("settings", [{"max_grad_norm": 0.0}, {"optim_args": "max_grad_norm=0"}])
def test_zero_does_not_clip_and_the_norm_is_still_reported(tmp_path, settings):
    unclipped = trained(tmp_path / "a", optim=OURS, logging_steps=1, max_steps=4, **settings)
    assert unclipped.args.max_grad_norm == 0 and optimizer_of(unclipped).max_grad_norm is None
    clipped = trained(tmp_path / "b", optim=OURS, max_grad_norm=1e6, max_steps=4)
    assert all(norm > 0 for norm in logged(unclipped, "grad_norm"))
    assert_same(unclipped, clipped)


def test_a_step_with_infinite_gradients_is_left_out_and_logged(tmp_path):
    poison = Poison()
    trainer = trained(
        tmp_path,
        optim="adamw_bf16_sr",
        optim_args="skip_nonfinite=True,max_grad_norm=1.0",
        callbacks=[poison],
        logging_steps=1,
    )
    steps = trainer.state.max_steps
    assert poison.backwards == steps
    assert logged(trainer, "skipped_steps") == [0, 0, *[1] * (steps - 2)]
    assert math.isinf(logged(trainer, "grad_norm")[2])
    assert all(map(math.isfinite, losses(trainer)))
    assert all(param.isfinite().all() for param in trainer.model.parameters())
    assert {float(state["step"]) for state in optimizer_of(trainer).state.values()} == {steps - 1}


class TestLiger:
    @pytest.fixture(autouse=True)
    def liger(self):
        """Liger, whose patches of transformers' Llama end with the test."""
        kernels = pytest.importorskip("liger_kernel.transformers")
        with liger_patches_undone():
            yield kernels

    def test_it_is_refused_on_a_cpu(self, tmp_path):
        with pytest.raises(ValueError, match="use_liger_kernel=True: Liger's Triton kernels do not run on a CPU"):
            trained(tmp_path, optim=OURS, use_liger_kernel=True)

    @pytest.mark.parametrize("first", [True, False], ids=["patched_first", "cast_first"])
    def test_no_conversion_stands_around_its_norms(self, liger, monkeypatch, first):
        """Its kernel reads and writes 16 bits and computes in FP32, with the FP32 weight."""
        from tests.support.training import liger_in_interpreter

        plain, model = llama(), llama()
        hf_lowprec.cast_model(plain)
        for step in (0, 1) if first else (1, 0):
            if step == 0:
                others = {"swiglu": False, "rope": False, "fused_linear_cross_entropy": False}
                liger._apply_liger_kernel_to_instance(model=model, **others)
            else:
                hf_lowprec.cast_model(model)
        assert_pure_bf16(model)
        liger_in_interpreter.run_norms(model, monkeypatch)
        tokens = torch.arange(24).view(2, 12)
        loss, exact = (each(input_ids=tokens, labels=tokens).loss for each in (model, plain))
        assert norms_in_graph(loss) == (2 * model.config.num_hidden_layers + 1, 0)
        # The interpreter truncates where a GPU rounds: the normalized value and its product with the weight are each
        # up to 2**-7 smaller. A uniform part of that scales logits, of size 1 at most; the rest averages out.
        assert loss.item() == pytest.approx(exact.item(), abs=2 * 2**-7)


def norms_in_graph(loss):
    """The numbers of Liger's norms in the graph of `loss`, and of conversions of their inputs and outputs."""
    seen, left, edges = set(), [loss.grad_fn], []
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        before = [each for each, _ in node.next_functions if each is not None]
        edges += [(node.name(), each.name()) for each in before]
        left += before
    kernels = sum("LigerRMSNorm" in node.name() for node in seen)
    return kernels, sum("LigerRMSNorm" in "".join(edge) and "ToCopy" in "".join(edge) for edge in edges)


def test_liger_and_a_head_in_fp32():
    """Its fused loss multiplies the head's weight by hidden states itself."""
    args = SimpleNamespace(use_liger_kernel=True, device=torch.device("cuda"), liger_kernel_config=None)
    check_liger(args, ())
    with pytest.raises(ValueError, match=r"weight of lm_head.*set liger_kernel_config=\{'fused_linear_cross_entropy'"):
        check_liger(args, ("lm_head",))
    args.liger_kernel_config = {"fused_linear_cross_entropy": False}
    check_liger(args, ("lm_head",))
