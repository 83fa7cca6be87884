"""Labels for any model of transformers, by the name of its class, and sizes that batches read from its config."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from tests.support.every_architecture.tiny_configs import FIRST_TOKEN, IMAGE, VOCABULARY

Batch = dict[str, Any]
ROWS, LENGTH = 2, 12


def find(config: PreTrainedConfig, *names: str, default: Any = None, kind: type | tuple[type, ...] = int) -> Any:
    """The first field of that name in the config or in a config inside it."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, kind) and not isinstance(value, bool):
            return value
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig) and (value := find(part, *names, kind=kind)) is not None:
            return value
    return default


def tokens_of(config: PreTrainedConfig, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    try:
        text = config.get_text_config()
    except ValueError:  # several; input_ids are the encoder's
        text = config.get_text_config(encoder=True)
    most = find(text, "vocab_size", default=VOCABULARY)
    return torch.randint(min(FIRST_TOKEN, most // 2), min(most, VOCABULARY), (rows, length))


def asks_labels(names: set[str]) -> set[str]:
    return names & {"labels", "start_positions", "class_labels", "return_loss"}


def _boxes(count: int) -> Tensor:
    return torch.cat((torch.rand(count, 2) * 0.4 + 0.3, torch.rand(count, 2) * 0.2 + 0.1), -1)


def _map(parts: Batch) -> tuple[int, int]:
    pixels = parts.get("pixel_values", torch.empty(1, 1, IMAGE, IMAGE))
    return pixels.shape[-2], pixels.shape[-1]


def objects(size: tuple[int, int]) -> Batch:
    """Two objects in each image, with their boxes and masks."""
    return {
        "labels": [
            {"class_labels": torch.tensor([0, 1]), "boxes": _boxes(2), "masks": (torch.rand(2, *size) > 0.5).float()}
            for _ in range(ROWS)
        ]
    }


def masks(size: tuple[int, int]) -> Batch:
    """The same as masks and their classes."""
    return {
        "mask_labels": [(torch.rand(2, *size) > 0.5).float() for _ in range(ROWS)],
        "class_labels": [torch.tensor([0, 1]) for _ in range(ROWS)],
    }


def _words(config: Any, parts: Batch) -> Batch:
    return {"labels": tokens_of(config, length=5)}


LABELS: list[tuple[str, Callable[[Any, Batch], Batch]]] = [
    (r"ForMultipleChoice|NextSentence", lambda config, parts: {"labels": torch.arange(ROWS) % 2}),
    (
        r"(Sequence|Image|Video|Audio|Document)Classification|XVector",
        lambda config, parts: {"labels": torch.arange(ROWS) % config.num_labels},
    ),
    (
        r"TokenClassification|AudioFrameClassification",
        lambda config, parts: {"labels": parts["input_ids"] % config.num_labels},
    ),
    (
        r"QuestionAnswering",
        lambda config, parts: {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])},
    ),
    (r"ObjectDetection|ForSegmentation|TableRecognition", lambda config, parts: objects(_map(parts))),
    (r"UniversalSegmentation|InstanceSegmentation", lambda config, parts: masks(_map(parts))),
    (
        r"SemanticSegmentation",
        lambda config, parts: {"labels": torch.randint(0, config.num_labels, (ROWS, *_map(parts)))},
    ),
    (r"DepthEstimation", lambda config, parts: {"labels": torch.rand(ROWS, *_map(parts)) + 0.1}),
    (r"CTC|RNNT|TDT|Transducer", _words),
]


def labels_of(model: nn.Module, config: Any, names: set[str], parts: Batch) -> Batch:
    make = next((make for pattern, make in LABELS if re.search(pattern, type(model).__name__)), None)
    if make is not None:
        try:
            return {name: value for name, value in make(config, parts).items() if name in names}
        except (KeyError, AttributeError):
            return {}
    if "labels" in names and "input_ids" in parts:
        mask = parts.get("attention_mask", torch.ones_like(parts["input_ids"]))
        special = parts["input_ids"] < FIRST_TOKEN // 2
        return {"labels": parts["input_ids"].masked_fill((mask == 0) | special, -100)}
    if "labels" in names:
        return _words(config, parts)
    return {"return_loss": True} if "return_loss" in names else {}
