"""Generated text that counts in words: its tokenizer, sentences, and pairs of preferred and rejected answers."""

import random

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(60)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def tokenizer() -> PreTrainedTokenizerFast:
    """64 words, one token each."""
    words = {word: k for k, word in enumerate(SPECIAL + WORDS)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


def counting(start: int, length: int) -> str:
    """`length` words from number `start` on."""
    return " ".join(WORDS[(start + k) % len(WORDS)] for k in range(length))


def sentences(rows: int = 64) -> list[str]:
    """Sentences of different lengths."""
    chance = random.Random(0)
    return [counting(chance.randrange(60), chance.randrange(6, 14)) for _ in range(rows)]


def pairs(rows: int = 64) -> list[tuple[str, str]]:
    """Beginnings, and how each goes on."""
    chance = random.Random(0)
    starts = [chance.randrange(60) for _ in range(rows)]
    return [(counting(start, 5), counting(start + 5, 5)) for start in starts]


def preferences(rows: int = 64) -> list[dict[str, str]]:
    """Beginnings; the next words are preferred, random words are rejected."""
    chance = random.Random(0)
    found = []
    for _ in range(rows):
        start = chance.randrange(60)
        noise = " ".join(chance.choice(WORDS) for _ in range(4))
        found.append({"prompt": counting(start, 4), "chosen": f" {counting(start + 4, 4)}", "rejected": f" {noise}"})
    return found
