"""What models return to a loop: FP32 under `prepare_accelerator`, as under Trainer, and after `return_float32`."""

import copy
import io
import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from transformers import Trainer

import hf_lowprec
from tests.support.models import tiny_models
from tests.support.processes.fsdp_on_cpu import allow_fsdp_on_cpu
from tests.support.processes.ranks import on_ranks
from tests.support.training.tiny_trainer import VOCABULARY, arguments, assert_follows, llama, trained

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def prepared(model, **settings):
    """As a loop prepares it: two lines of ours."""
    accelerator = Accelerator(cpu=True, **settings)
    hf_lowprec.cast_model(model)
    hf_lowprec.prepare_accelerator(accelerator)
    return accelerator, accelerator.prepare(model)


def reference_loss(name, logits, labels):
    """The loss of FP32 code on predictions that were rounded to BF16."""
    assert torch.equal(logits, logits.to(BF16).to(FP32))
    if name == "llama":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return cross_entropy(logits.double().flatten(0, -2), labels.flatten())


@pytest.mark.parametrize("name", ["bert", "t5", "llama"])
def test_a_loop_gets_what_trainer_gets(tmp_path, name):
    build = tiny_models.ARCHITECTURES[name].build
    model, batch = build()
    trainer = Trainer(build()[0], arguments(tmp_path, optim="adamw_bf16_kahan"), train_dataset=[{}])
    _, model = prepared(model)
    outputs = model(**batch)
    assert outputs.loss.requires_grad and outputs.logits.dtype == FP32
    assert torch.equal(outputs.loss, trainer.compute_loss(trainer.model, batch))
    with torch.no_grad():  # without gradients attention takes another path, also in FP32
        outputs, expected = model(**batch), trainer.compute_loss(trainer.model, batch)
    assert torch.equal(outputs.loss, expected)
    assert outputs.logits.dtype == outputs.loss.dtype == FP32
    exact = reference_loss(name, outputs.logits, batch["labels"])
    # FP32 sums of some hundred terms, each rounded a few times: far below the 2^-9 of a loss in BF16.
    assert outputs.loss.item() == pytest.approx(exact.item(), rel=1e-6)
    assert not torch.equal(outputs.loss, outputs.loss.to(BF16).float()), "a loss of eight bits"


class OwnLoss(Trainer):
    """As code that weighs classes has it, with the labels left in the inputs."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        weight = torch.linspace(0.3, 2.7, outputs.logits.shape[-1])
        loss = cross_entropy(outputs.logits.flatten(0, -2), inputs["labels"].flatten(), weight)
        return (loss, outputs) if return_outputs else loss


def own_loss(model, inputs, **_):
    return OwnLoss.compute_loss(None, model, inputs)


class OwnStep(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = own_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


class DelegatingStep(Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize("given", ["model", "model_init"])
@pytest.mark.parametrize("trainer_class", [OwnLoss, OwnStep, Trainer])
def test_a_loss_of_ones_own_is_that_of_fp32(tmp_path, trainer_class, given):
    (model, batch), (twin, _) = tiny_models.llama(), tiny_models.llama()
    rows = [{name: values[k] for name, values in batch.items()} for k in range(len(batch["labels"]))]
    args = arguments(tmp_path, optim="adamw_bf16_kahan", max_steps=1, per_device_train_batch_size=len(rows))
    model = {"model": model} if given == "model" else {"model_init": lambda: tiny_models.llama()[0]}
    trainer = trainer_class(**model, args=args, train_dataset=rows)
    if trainer_class is Trainer:
        trainer.compute_loss = own_loss
    _, twin = prepared(twin)
    # A loss in BF16 is off by up to 2^-9.
    assert trainer.train().training_loss == pytest.approx(own_loss(twin, batch).item(), rel=1e-6)


@pytest.mark.parametrize("trainer_class", [Trainer, type("Mine", (Trainer,), {}), DelegatingStep])
def test_trainers_own_compute_loss_has_no_copies(tmp_path, trainer_class):
    model, batch = tiny_models.ARCHITECTURES["llama"].build()
    trainer = trainer_class(model, arguments(tmp_path, optim="adamw_bf16_kahan"), train_dataset=[{}])
    model = trainer.accelerator.prepare(trainer.model)
    loss, outputs = trainer.compute_loss(model, batch, return_outputs=True)
    assert (loss.dtype, outputs.logits.dtype) == (FP32, BF16)


def test_caches_stay_and_generation_gives_the_same_tokens():
    torch.manual_seed(0)
    model, batch = tiny_models.llama()
    plain = copy.deepcopy(model)
    hf_lowprec.cast_model(plain)
    accelerator, model = prepared(model)
    outputs = model(input_ids=batch["input_ids"], use_cache=True)
    assert outputs.logits.dtype == FP32
    assert outputs.past_key_values.layers[0].keys.dtype == BF16
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True}
    tokens = accelerator.unwrap_model(model).generate(batch["input_ids"], **options)
    assert torch.equal(tokens, plain.generate(batch["input_ids"], **options))


def outputs_hooks(model):
    names = ("upcast_model_outputs", "upcast_model_outputs_without_loss")
    return [hook for hook in model._forward_hooks.values() if getattr(hook, "__name__", "") in names]


def test_given_twice_and_unwrapped_saved_and_copied(tmp_path):
    model, batch = tiny_models.bert()
    accelerator, ready = prepared(model)
    assert accelerator.prepare(ready) is ready and accelerator.prepare_model(model) is model
    hf_lowprec.return_float32(ready)
    assert len(outputs_hooks(ready)) == len(ready.classifier._forward_hooks) == 1
    assert not hf_lowprec.cast_model(ready).changed
    bare = accelerator.unwrap_model(ready)
    expected = ready(**batch)
    buffer = io.BytesIO()
    torch.save(bare, buffer)
    buffer.seek(0)
    twins = (copy.deepcopy(ready), pickle.loads(pickle.dumps(bare)), torch.load(buffer, weights_only=False))
    for twin in twins:
        outputs = twin(**batch)
        assert torch.equal(outputs.loss, expected.loss) and outputs.logits.dtype == FP32
    bare.save_pretrained(tmp_path)
    loaded = type(bare).from_pretrained(tmp_path, dtype=FP32)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, bare.state_dict()[name].to(tensor.dtype)), name


@pytest.mark.every_case  # compiling takes eight seconds
@pytest.mark.slow
def test_a_compiled_model():
    torch.compiler.reset()
    model, batch = tiny_models.bert()
    plain = copy.deepcopy(model)
    plugin = TorchDynamoPlugin(backend="eager")
    accelerator, compiled = prepared(model, dynamo_plugin=plugin)
    assert compiled is not model
    outputs = compiled(**batch)
    assert outputs.logits.dtype == outputs.loss.dtype == FP32
    _, uncompiled = prepared(plain)
    assert torch.equal(outputs.loss, uncompiled(**batch).loss)
    inner = accelerator.unwrap_model(compiled, keep_torch_compile=False)
    assert inner is model and len(outputs_hooks(inner)) == 1
    hf_lowprec.return_float32(compiled)
    assert len(outputs_hooks(inner)) == 1 and not outputs_hooks(compiled)


def test_a_model_that_was_cast_below_its_wrapper():
    """PEFT's wrapper is the model then, and has no mark of its own."""
    peft = pytest.importorskip("peft")
    model, batch = tiny_models.bert()
    hf_lowprec.cast_model(model)
    config = peft.LoraConfig(target_modules=["query", "value"], task_type="SEQ_CLS", r=2)
    wrapped = peft.get_peft_model(model, config)
    accelerator = Accelerator(cpu=True)
    hf_lowprec.prepare_accelerator(accelerator)
    wrapped = accelerator.prepare(wrapped)
    outputs = wrapped(**batch)
    assert outputs.logits.dtype == outputs.loss.dtype == FP32
    outputs.loss.backward()


class Judge(nn.Module):
    """A model inside another, and a head of its own, which computes with the model's predictions."""

    def __init__(self, model):
        super().__init__()
        self.model, self.head = model, nn.Linear(tiny_models.VOCABULARY, 1)

    def forward(self, **batch):
        return {"scores": self.head(self.model(**batch).logits), "parts": [torch.ones(2), torch.ones(2, dtype=BF16)]}


@pytest.mark.parametrize("before", [False, True], ids=["as a whole", "with a model that was cast on its own"])
def test_a_model_inside_another_and_several_at_once(before):
    (model, batch), (reward, _) = tiny_models.llama(), tiny_models.llama(seed=1)
    if before:
        hf_lowprec.cast_model(reward)
        hf_lowprec.return_float32(reward)
    judge = Judge(reward)
    for each in (model, judge):
        hf_lowprec.cast_model(each)
    assert judge(**batch)["scores"].dtype == reward(**batch).logits.dtype == BF16
    accelerator = Accelerator(cpu=True)
    hf_lowprec.prepare_accelerator(accelerator)
    model, judge = accelerator.prepare(model, judge)
    found = judge(**batch)
    assert [found["scores"].dtype, *(part.dtype for part in found["parts"])] == [FP32] * 3
    assert not outputs_hooks(judge.model), "inside, one format"
    assert model(**batch).logits.dtype == FP32
    found["scores"].sum().backward()
    assert judge.head.weight.grad is not None and reward.lm_head.weight.grad is not None


def test_models_to_evaluate_and_models_that_nobody_has_cast():
    (teacher, batch), (other, _) = tiny_models.llama(), tiny_models.llama()
    hf_lowprec.cast_model(teacher)
    accelerator = Accelerator(cpu=True)
    hf_lowprec.prepare_accelerator(accelerator)
    tokens = {"input_ids": batch["input_ids"]}
    assert accelerator.prepare_model(teacher, evaluation_mode=True)(**tokens).logits.dtype == FP32
    # 16 bits by the user's own word, and only by that.
    assert accelerator.prepare_model(other.to(BF16))(**tokens).logits.dtype == BF16


def test_one_call_for_a_loop_without_accelerate():
    model, batch = tiny_models.bert()
    hf_lowprec.cast_model(model)
    assert model(**batch).loss.dtype == BF16
    hf_lowprec.return_float32(model)
    outputs = model(**batch)
    assert outputs.loss.dtype == outputs.logits.dtype == FP32
    assert outputs.loss.item() == pytest.approx(cross_entropy(outputs.logits.double(), batch["labels"]).item(), 1e-6)
    fresh, _ = tiny_models.bert()
    with pytest.raises(ValueError, match="BertForSequenceClassification was not cast; call cast_model"):
        hf_lowprec.return_float32(fresh)
    average = hf_lowprec.AveragedModel(model)
    assert not outputs_hooks(average.module)


class DistillationLoss(nn.Module):
    def __init__(self, model, teacher):
        super().__init__()
        self.model, self.teacher = model, teacher
        self.head = nn.Sequential(nn.Linear(VOCABULARY, 16), nn.LayerNorm(16), nn.Linear(16, VOCABULARY))
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("queue", torch.randn(4, VOCABULARY))

    def forward(self, tokens):
        logits, taught = self.model(tokens).logits, self.teacher(tokens).logits
        assert {logits.dtype, taught.dtype} == {torch.float32}
        scores = self.head(logits) * self.log_scale.exp() + taught @ self.queue.T @ self.queue / VOCABULARY
        return cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) + mse_loss(logits, taught)


class LossTrainer(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        torch.manual_seed(5)
        self.loss = DistillationLoss(self.model, llama(seed=6))

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return self.loss(inputs["input_ids"])

    def get_optimizer_cls_and_kwargs(self, args, model=None):
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, self.loss)
        return cls, kwargs | {"params": self.loss.parameters()}


def test_only_models_in_a_loss_are_cast(tmp_path):
    settings = {"trainer_cls": LossTrainer, "learning_rate": 1e-3, "max_steps": 6, "logging_steps": 2}
    reference = trained(tmp_path, optim="adamw_torch", **settings)
    args = "keep_fp32=head.0|model.model.layers.0.mlp.up_proj|teacher.lm_head"
    with pytest.raises(ValueError, match=r"too late for .*model\.layers\.0\.mlp"):
        trained(tmp_path, optim="adamw_bf16_split", optim_args=args, **settings)
    with pytest.raises(ValueError, match=r"'head\.9' matches no module or tensor; similar names: .*head\.0"):
        trained(tmp_path, optim="adamw_bf16_split", optim_args="keep_fp32=head.9", **settings)
    args = "keep_fp32=head.0|model.layers.0.mlp.up_proj|teacher.lm_head"
    trainer = trained(tmp_path, optim="adamw_bf16_split", optim_args=args, **settings)
    assert_follows(trainer, reference)
    for name, tensor in (*trainer.loss.named_parameters(), *trainer.loss.named_buffers()):
        kept = any(part in name for part in ("norm", "inv_freq", "layers.0.mlp.up_proj", "teacher.lm_head"))
        exact = not name.startswith(("model.", "teacher.")) or kept
        assert tensor.dtype == (torch.float32 if exact else torch.bfloat16), name


def check_outputs(kind: str) -> None:
    allow_fsdp_on_cpu()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if kind == "fsdp2" else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model, batch = tiny_models.bert()
    hf_lowprec.cast_model(model)
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-3)
    hf_lowprec.prepare_accelerator(accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        outputs = model(**batch)
        assert outputs.logits.dtype == torch.float32
        exact = cross_entropy(outputs.logits.double(), batch["labels"])
        assert abs(outputs.loss.double() - exact) < 1e-6 * exact, (outputs.loss, exact)
        assert outputs.loss != outputs.loss.bfloat16()
        accelerator.backward(outputs.loss)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        gathered = accelerator.gather_for_metrics(model(**batch).logits)
    assert gathered.cpu().numpy().shape == (accelerator.num_processes * tiny_models.BATCH, tiny_models.CLASSES)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.every_case), "fsdp2"])
def test_on_two_ranks(kind):
    on_ranks(check_outputs, 2, kind)
