"""sentence-transformers' trainer: a stack of modules, losses with and without parameters, evaluation, checkpoints."""

import copy
import shutil

import pytest
import torch
from transformers import BertConfig, BertModel

import hf_lowprec  # noqa: F401
from tests.support.chosen_cases import nightly_except
from tests.support.training.counting_text import pairs, tokenizer
from tests.support.training.tiny_trainer import arguments, assert_follows, losses

library = pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")
modules = pytest.importorskip("sentence_transformers.models")
criteria = pytest.importorskip("sentence_transformers.losses")
evaluation = pytest.importorskip("sentence_transformers.evaluation")

OURS = "adamw_bf16_kahan"
ANCHORS, POSITIVES = (list(texts) for texts in zip(*pairs(), strict=True))
PAIRS = {"anchor": ANCHORS, "positive": POSITIVES}
TRIPLETS = PAIRS | {"negative": POSITIVES[::-1]}
CLASSES = {"sentence": ANCHORS, "label": [k % 3 for k in range(64)]}
SIMILAR = PAIRS | {"label": [k % 5 / 4 for k in range(64)]}
SAME = PAIRS | {"label": [k % 2 for k in range(64)]}
EMBEDDINGS = {"sentence": ANCHORS, "label": torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).tolist()}
RANKING = "MultipleNegativesRankingLoss"
SMOOTH = {RANKING, "classifier", "ContrastiveTension", "EmbedDistill projected"}  # not of small differences
NAMES = (
    (PAIRS, "ContrastiveTension MegaBatchMargin GlobalOrthogonalRegularization"),
    (PAIRS, "MultipleNegativesSymmetricRanking CachedMultipleNegativesSymmetricRanking"),
    (TRIPLETS, "Triplet"),
    (TRIPLETS | {"label": SIMILAR["label"]}, "MarginMSE"),
    (TRIPLETS | {"label": [[k / 64, 1 - k / 64] for k in range(64)]}, "DistillKLDiv"),
    (CLASSES, "BatchAllTriplet BatchHardTriplet BatchSemiHardTriplet BatchHardSoftMarginTriplet"),
    (SAME, "Contrastive OnlineContrastive"),
    (SIMILAR, "AnglE CoSENT CosineSimilarity"),
    (EMBEDDINGS, "EmbedDistill MSE"),
)
CRITERIA = {
    RANKING: (PAIRS, criteria.MultipleNegativesRankingLoss),
    "two passes": (PAIRS, lambda m: criteria.CachedMultipleNegativesRankingLoss(m, mini_batch_size=4)),
    # With layers of their own.
    "classifier": (PAIRS | {"label": CLASSES["label"]}, lambda m: criteria.SoftmaxLoss(m, 16, num_labels=3)),
    "EmbedDistill projected": (EMBEDDINGS, lambda m: criteria.EmbedDistillLoss(m, projection_dim=16)),
    "MSE projected": (EMBEDDINGS, lambda m: criteria.MSELoss(m, projection_dim=16)),
    "tension in batch": ({"text": ANCHORS}, criteria.ContrastiveTensionLossInBatchNegatives),
    # Around other losses, and with another encoder.
    "layers": (PAIRS, lambda m: criteria.AdaptiveLayerLoss(m, getattr(criteria, RANKING)(m))),
    "nested": (PAIRS, lambda m: criteria.MatryoshkaLoss(m, getattr(criteria, RANKING)(m), [16, 8])),
    "both": (PAIRS, lambda m: criteria.Matryoshka2dLoss(m, getattr(criteria, RANKING)(m), [16, 8])),
    "guided": (PAIRS, lambda m: criteria.GISTEmbedLoss(m, copy.deepcopy(m))),
    "guided in two passes": (PAIRS, lambda m: criteria.CachedGISTEmbedLoss(m, copy.deepcopy(m), mini_batch_size=4)),
    **{name: (columns, getattr(criteria, f"{name}Loss")) for columns, names in NAMES for name in names.split()},
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


def run(saved, folder, optim, criterion=RANKING, resume=None, **settings):
    model = embedder(saved)
    columns, make_loss = CRITERIA[criterion]
    data = datasets.Dataset.from_dict(columns)
    settings = {"learning_rate": 3e-3, "max_steps": 8, "logging_steps": 2, **settings}
    trainer = library.SentenceTransformerTrainer(
        model=model,
        args=arguments(folder, cls=library.SentenceTransformerTrainingArguments, optim=optim, **settings),
        train_dataset=data,
        eval_dataset=data,
        loss=make_loss(model),
        evaluator=evaluation.TripletEvaluator(ANCHORS, POSITIVES, POSITIVES[::-1]),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("criterion", nightly_except({"classifier", "ContrastiveTension"}, CRITERIA))
def test_losses(saved, tmp_path, criterion):
    settings = {"eval_strategy": "steps", "eval_steps": 4, "learning_rate": 3e-4}
    reference = run(saved, tmp_path, "adamw_torch", criterion, **settings)
    trainer = run(saved, tmp_path, OURS, criterion, **settings)
    assert_follows(trainer, reference, 0.005 if criterion in SMOOTH else 0.05)
    for name, parameter in trainer.loss.named_parameters():
        own = name.startswith(("classifier", "projection", "logit_scale"))
        assert parameter.dtype == (torch.float32 if own or "LayerNorm" in name else torch.bfloat16), name
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
