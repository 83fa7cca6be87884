"""sentence-transformers: `SentenceTransformerTrainer` with `optim=`, and a checkpoint resumed."""

import torch
from counting_text import pairs, tokenizer
from datasets import Dataset
from host_steps import Steps
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel

import hf_lowprec  # noqa: F401  (registers the optimizer names)

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 16}
BertModel(BertConfig(num_hidden_layers=2, num_attention_heads=2, **sizes)).save_pretrained("bert")
tokenizer().save_pretrained("bert")
rows = Dataset.from_list([{"anchor": anchor, "positive": positive} for anchor, positive in pairs(64)])


def train(max_steps: int, optim: str = "adamw_bf16_split", resume: bool = False) -> SentenceTransformer:
    model = SentenceTransformer(modules=[Transformer("bert"), Pooling(32)])
    args = SentenceTransformerTrainingArguments(
        output_dir=optim,
        optim=optim,
        learning_rate=1e-5,
        max_steps=max_steps,
        save_steps=4,
        per_device_train_batch_size=16,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    loss = losses.MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=rows, loss=loss)
    trainer.train(resume_from_checkpoint=resume)
    return model


steps = Steps()
train(4)
steps.check(4, lr=1e-5, rounding="split")
steps = Steps()
model = train(6, resume=True)
steps.check(2, lr=1e-5, rounding="split")
exact, other = (one.encode(["w1 w2 w3"]) for one in (train(6, optim="adamw_torch"), model))
assert other.dtype.name == "float32"
assert abs(exact - other).max() < 2**-5 * abs(exact).max()  # a few roundings of the two layers' BF16
