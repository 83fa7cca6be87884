"""Trainers whose methods other libraries, or subclasses, have replaced by ones with other signatures."""

import functools

import pytest
import torch
from transformers import Trainer

from hf_lowprec.integrations.transformers import private_apis
from hf_lowprec.integrations.transformers.trainer import _EVERY_TRAINER, _OUR_TRAINERS, wrap_trainer
from tests.support.training.tiny_trainer import arguments, assert_pure_bf16, counting_data, llama


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
        monkeypatch.setattr(private_apis, "constructor_arguments", private_apis.constructor_arguments.__wrapped__)
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
    resumed = trained(tmp_path, "adamw_bf16_split", resume=str(tmp_path / "checkpoint-1"))
    assert all(map(torch.equal, ours.model.parameters(), resumed.model.parameters()))


def test_an_optimizer_made_by_a_partial_method(tmp_path):
    class Partial(Trainer):
        def make(self, model=None, momentum=0.0):
            made.append(momentum)
            return super().create_optimizer()

        create_optimizer = functools.partialmethod(make, momentum=0.5)

    made = []
    trainer = Partial(
        llama(), arguments(tmp_path, optim="adamw_bf16_split", max_steps=1), train_dataset=counting_data()
    )
    trainer.train()
    assert made == [0.5]


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_bf16_split"])
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"callbacks": 3}, TypeError),
        ({"no_argument": 1}, TypeError),
        ({"model_init": llama}, ValueError),
        ({"train_dataset": iter(())}, ValueError),
        ({"optimizers": (None, None, None)}, ValueError),
        ({"eval_dataset": None}, ValueError),
    ],
)
def test_what_trainer_refuses_leaves_the_model_as_it_was(tmp_path, optim, wrong, error):
    model, args = llama(), arguments(tmp_path, optim=optim, max_steps=-1, eval_strategy="steps")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error):
        Trainer(model, args, **{"train_dataset": counting_data(), "eval_dataset": counting_data(), **wrong})
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
