"""What models return to a loop: FP32 under `prepare_accelerator`, as under Trainer, and after `return_float32`."""

import copy
import io
import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertModel,
    BertPreTrainedModel,
    CLIPConfig,
    CLIPModel,
    Trainer,
)

import hf_lowprec
from tests.support.models import tiny_models
from tests.support.processes.ranks import run_ranks
from tests.support.training.tiny_trainer import arguments

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
    assert torch.equal(model(**batch).loss, trainer.compute_loss(trainer.model, batch))
    with torch.no_grad():  # without gradients attention takes another path, also in FP32
        outputs, expected = model(**batch), trainer.compute_loss(trainer.model, batch)
    assert torch.equal(outputs.loss, expected)
    assert outputs.logits.dtype == outputs.loss.dtype == FP32
    exact = reference_loss(name, outputs.logits, batch["labels"])
    # FP32 sums of some hundred terms, each rounded a few times: far below the 2^-9 of a loss in BF16.
    assert outputs.loss.item() == pytest.approx(exact.item(), rel=1e-6)
    assert not torch.equal(outputs.loss, outputs.loss.to(BF16).float()), "a loss of eight bits"


def test_an_evaluation_in_numpy():
    """A loop of the shape of transformers' `run_qa_no_trainer.py`."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertForQuestionAnswering(BertConfig(vocab_size=64, **size))
    rows = [{"input_ids": torch.arange(k, k + 8), "start_positions": k % 8, "end_positions": 7} for k in range(10)]
    accelerator = Accelerator(cpu=True)
    hf_lowprec.cast_model(model)
    hf_lowprec.prepare_accelerator(accelerator)
    optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-3)
    questions = [{"input_ids": row["input_ids"]} for row in rows]
    model, optimizer, loader, evaluation = accelerator.prepare(
        model, optimizer, DataLoader(rows, batch_size=4), DataLoader(questions, batch_size=4)
    )
    found = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    assert not all(torch.equal(loss, loss.to(BF16).float()) for loss in found)
    model.eval()
    starts = []
    for batch in evaluation:
        with torch.no_grad():
            outputs = model(**batch)
        logits = accelerator.pad_across_processes(outputs.start_logits, dim=1, pad_index=-100)
        starts.append(accelerator.gather_for_metrics(logits).cpu().numpy())
    assert [part.shape for part in starts] == [(4, 8), (4, 8), (2, 8)]
    assert {str(part.dtype) for part in starts} == {"float32"}


def test_outputs_next_to_a_loss_are_fp32_in_a_loop():
    """As under accelerate's mixed precision: training accuracy and losses of the loop's own are made of them."""
    model, batch = tiny_models.ARCHITECTURES["llama"].build()
    _, model = prepared(model)
    outputs = model(**batch)
    assert outputs.loss.requires_grad and outputs.logits.dtype == FP32
    assert outputs.logits.detach().numpy().dtype == "float32"


class OwnLoss(Trainer):
    """As code that weighs classes has it, with the labels left in the inputs."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        weight = torch.linspace(0.3, 2.7, outputs.logits.shape[-1])
        loss = cross_entropy(outputs.logits.flatten(0, -2), inputs["labels"].flatten(), weight)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("given", ["model", "model_init"])
def test_a_compute_loss_of_ones_own_gets_fp32(tmp_path, given):
    build = tiny_models.ARCHITECTURES["llama"].build
    model = {"model": build()[0]} if given == "model" else {"model_init": lambda: build()[0]}
    trainer = OwnLoss(**model, args=arguments(tmp_path, optim="adamw_bf16_kahan"), train_dataset=[{}])
    loss, outputs = trainer.compute_loss(trainer.model, build()[1], return_outputs=True)
    assert loss.dtype == outputs.logits.dtype == FP32
    loss.backward()


@pytest.mark.parametrize("trainer_class", [Trainer, type("Mine", (Trainer,), {})])
def test_trainers_own_compute_loss_has_no_copies(tmp_path, trainer_class):
    model, batch = tiny_models.ARCHITECTURES["llama"].build()
    trainer = trainer_class(model, arguments(tmp_path, optim="adamw_bf16_kahan"), train_dataset=[{}])
    loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    assert (loss.dtype, outputs.logits.dtype) == (FP32, BF16)


class OwnHead(BertPreTrainedModel):
    """A head whose class is the user's, with the loss in `forward`."""

    def __init__(self, config, weight=None):
        super().__init__(config)
        self.bert, self.classifier, self.class_weight = BertModel(config), nn.Linear(32, 3), weight
        self.post_init()

    def forward(self, input_ids, labels):
        logits = self.classifier(self.bert(input_ids)[1])
        return {"loss": cross_entropy(logits, labels, self.class_weight), "logits": logits}


class PlainHead(nn.Module):
    """The same without transformers."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Embedding(64, 32), nn.Linear(32, 3)

    def forward(self, input_ids, labels):
        logits = self.head(self.body(input_ids).mean(1))
        return {"loss": nn.CrossEntropyLoss()(logits, labels), "logits": logits}


class Multiplied(nn.Module):
    """Goes on computing with what its last child returns and a 16-bit weight."""

    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Embedding(64, 32), nn.Linear(32, 32)

    def forward(self, input_ids, labels):
        logits = self.norm(self.body(input_ids).mean(1)) @ self.body.weight.T
        return {"loss": nn.CrossEntropyLoss()(logits, labels), "logits": logits}


BERT = BertConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
HEADS = {
    "of transformers' base class": lambda: OwnHead(BERT),
    "with weights of classes": lambda: OwnHead(BERT, torch.tensor([1.0, 2.7, 0.3])),
    "a plain module": PlainHead,
}


@pytest.mark.parametrize("made", HEADS)
def test_a_model_of_ones_own_that_computes_its_loss_computes_it_in_fp32(made):
    torch.manual_seed(0)
    model = HEADS[made]().eval()
    batch = {"input_ids": torch.arange(32).view(4, 8), "labels": torch.tensor([0, 1, 2, 0])}
    _, model = prepared(model)
    outputs = model(**batch)
    weight = getattr(model, "class_weight", None)
    logits = outputs["logits"].detach()
    assert torch.equal(logits, logits.to(BF16).float())
    exact = cross_entropy(logits.double(), batch["labels"], None if weight is None else weight.double())
    # A sum of four logarithms in FP32, a few roundings of 2^-24 each; one in BF16 is off by up to 2^-9.
    assert outputs["loss"].item() == pytest.approx(exact.item(), rel=1e-6)
    outputs["loss"].backward()


def test_a_contrastive_loss_is_computed_in_fp32():
    """CLIP's is in a function that `forward` calls, on a product of two projections."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**size, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 63}
    vision = {**size, "image_size": 8, "patch_size": 4}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    _, model = prepared(model)
    batch = {"input_ids": torch.randint(2, 63, (4, 6)), "pixel_values": torch.rand(4, 3, 8, 8)}
    outputs = model(**batch, return_loss=True)
    logits, matching = outputs.logits_per_text.detach().double(), torch.arange(4)
    exact = (cross_entropy(logits, matching) + cross_entropy(logits.t(), matching)) / 2
    # Sums of a few logarithms in FP32; a loss in BF16 is off by up to 2^-9.
    assert outputs.loss.item() == pytest.approx(exact.item(), rel=1e-6)
    assert not torch.equal(outputs.logits_per_text, outputs.logits_per_text.to(BF16).float())
    outputs.loss.backward()


def test_a_model_that_multiplies_with_weights_itself_is_left_alone():
    _, model = prepared(Multiplied())
    outputs = model(torch.arange(32).view(4, 8), labels=torch.tensor([0, 1, 2, 0]))
    outputs["loss"].backward()
    assert outputs["logits"].dtype == FP32


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
    """A model inside another, and a head of its own."""

    def __init__(self, model):
        super().__init__()
        self.model, self.head = model, nn.Linear(tiny_models.VOCABULARY, 1)

    def forward(self, **batch):
        return {"scores": self.head(self.model(**batch).logits), "parts": [torch.ones(2), torch.ones(2, dtype=BF16)]}


def test_a_model_inside_another_and_several_at_once():
    (model, batch), (reward, _) = tiny_models.llama(), tiny_models.llama(seed=1)
    judge = Judge(reward)
    for each in (model, judge):
        hf_lowprec.cast_model(each)
    accelerator = Accelerator(cpu=True)
    hf_lowprec.prepare_accelerator(accelerator)
    model, judge = accelerator.prepare(model, judge)
    tokens = {"input_ids": batch["input_ids"]}
    found = judge(**tokens)
    assert [found["scores"].dtype, *(part.dtype for part in found["parts"])] == [FP32] * 3
    assert not outputs_hooks(judge.model), "inside, one format"
    assert model(**tokens).logits.dtype == FP32


class Scorer(nn.Module):
    """Computes with the predictions of a model that computes its loss itself."""

    def __init__(self, model):
        super().__init__()
        self.model, self.head = model, nn.Linear(model.config.num_labels, 1)

    def forward(self, **batch):
        return self.head(self.model(**batch).logits)


@pytest.mark.parametrize("before", [False, True], ids=["as a whole", "with a model that was cast on its own"])
def test_predictions_that_the_model_around_computes_with(before):
    model, batch = tiny_models.bert()
    if before:
        hf_lowprec.cast_model(model)
        hf_lowprec.return_float32(model)
    scorer = Scorer(model)
    hf_lowprec.cast_model(scorer)
    assert scorer(**batch).dtype == model(**batch).logits.dtype == BF16
    hf_lowprec.return_float32(scorer)
    scores = scorer(**batch)
    assert scores.dtype == FP32
    scores.sum().backward()
    assert scorer.head.weight.grad is not None and model.classifier.weight.grad is not None


def test_a_part_of_a_cast_model():
    model, batch = tiny_models.bert()
    hf_lowprec.cast_model(model)
    accelerator = Accelerator(cpu=True)
    hf_lowprec.prepare_accelerator(accelerator)
    encoder = accelerator.prepare(model.bert)
    assert encoder(batch["input_ids"]).last_hidden_state.dtype == FP32


def test_models_to_evaluate_and_models_that_nobody_has_cast():
    (teacher, batch), (other, _) = tiny_models.llama(), tiny_models.llama()
    hf_lowprec.cast_model(teacher)
    accelerator = Accelerator(cpu=True)
    hf_lowprec.prepare_accelerator(accelerator)
    tokens = {"input_ids": batch["input_ids"]}
    assert accelerator.prepare_model(teacher, evaluation_mode=True)(**tokens).logits.dtype == FP32
    # 16 bits by the user's own word, and only by that.
    assert accelerator.prepare_model(other.to(BF16))(**tokens).logits.dtype == BF16


def test_a_model_that_was_prepared_before_the_accelerator():
    """With one process there is nothing to wrap, and so nothing to refuse."""
    model, batch = tiny_models.bert()
    hf_lowprec.cast_model(model)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(model)
    hf_lowprec.prepare_accelerator(accelerator)
    assert model(**batch).loss.dtype == FP32


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


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_on_two_ranks(kind):
    printed = run_ranks("accelerate_outputs.py", 2, kind)
    assert printed.count("FP32 outputs, a loss of FP32") == 2
