"""sentence-transformers' trainer: a stack of modules, losses with and without parameters, evaluation, checkpoints."""

import shutil

import pytest
import torch
from transformers import BertConfig, BertModel

from tests.support.chosen_cases import nightly_except
from tests.support.training.counting_text import pairs, tokenizer
from tests.support.training.tiny_trainer import arguments, assert_follows, losses

library = pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")
modules = pytest.importorskip("sentence_transformers.models")
criteria = pytest.importorskip("sentence_transformers.losses")
evaluation = pytest.importorskip("sentence_transformers.evaluation")

OURS = "adamw_bf16_kahan"
CRITERIA = {
    "ranking": criteria.MultipleNegativesRankingLoss,
    "ranking_in_two_passes": lambda model: criteria.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4),
    "classifier": lambda model: criteria.SoftmaxLoss(model, 16, num_labels=3),  # a layer of its own
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=64, max_position_embeddings=64, **size)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def embedder(saved):
    torch.manual_seed(1)
    parts = [modules.Transformer(saved, max_seq_length=32), modules.Pooling(32), modules.Dense(32, 16)]
    return library.SentenceTransformer(modules=[*parts, modules.Normalize()], device="cpu")


def run(saved, folder, optim, criterion="ranking", resume=None, **settings):
    model = embedder(saved)
    columns = {"anchor": [a for a, _ in pairs()], "positive": [b for _, b in pairs()]}
    if criterion == "classifier":
        columns["label"] = [k % 3 for k in range(64)]
    data = datasets.Dataset.from_dict(columns)
    settings = {"learning_rate": 3e-3, "max_steps": 8, "logging_steps": 2, **settings}
    trainer = library.SentenceTransformerTrainer(
        model=model,
        args=arguments(folder, cls=library.SentenceTransformerTrainingArguments, optim=optim, **settings),
        train_dataset=data,
        eval_dataset=data,
        loss=CRITERIA[criterion](model),
        evaluator=evaluation.TripletEvaluator(columns["anchor"], columns["positive"], columns["positive"][::-1]),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("criterion", nightly_except({"classifier"}, CRITERIA))
def test_losses(saved, tmp_path, criterion):
    settings = {"eval_strategy": "steps", "eval_steps": 4}
    reference = run(saved, tmp_path, "adamw_torch", criterion, **settings)
    trainer = run(saved, tmp_path, OURS, criterion, **settings)
    assert_follows(trainer, reference)
    for part in (trainer.model, trainer.loss):
        for name, parameter in part.named_parameters():
            assert parameter.dtype == (torch.float32 if "LayerNorm" in name else torch.bfloat16), name
    evaluated = [[set(entry) for entry in t.state.log_history if "eval_loss" in entry] for t in (trainer, reference)]
    assert evaluated[0] == evaluated[1]
    assert len(evaluated[0]) == 2
    assert trainer.model.encode(["w1 w2"]).dtype == "float32"


def test_resuming_is_bit_exact(saved, tmp_path):
    """The library reads checkpoints by `from_pretrained`, which gives FP32 norms the BF16 of the config."""
    settings = {"save_strategy": "steps", "save_steps": 4}
    whole = run(saved, tmp_path, OURS, **settings)
    shutil.rmtree(tmp_path / "checkpoint-8")
    resumed = run(saved, tmp_path, OURS, resume=str(tmp_path / "checkpoint-4"), **settings)
    assert losses(resumed)[-2:] == losses(whole)[-2:]
    for (name, ours), theirs in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
