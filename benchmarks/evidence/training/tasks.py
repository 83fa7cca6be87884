"""Small models of several kinds, and data that is generated or comes with installed packages."""

from __future__ import annotations

import copy
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F

ROWS_AT_ONCE = 512
"""In validation, so that memory stays small."""


class Stacked(nn.Module):
    """Models of several seeds as one module, whose parameters have a first dimension for them.

    Args:
        make: builds the model of one seed, which gives logits of shape (…, classes) for a batch.
        seeds: of the first weights.
    """

    def __init__(self, make: Callable[[], nn.Module], seeds: Sequence[int]) -> None:
        super().__init__()
        models = []
        for seed in seeds:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                models.append(make())
        self.each = copy.deepcopy(models[0])
        for name, stacked in stack_module_state(models)[0].items():  # type: ignore[arg-type]
            owner, _, leaf = name.rpartition(".")
            setattr(self.each.get_submodule(owner), leaf, nn.Parameter(stacked.detach()))

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of shape (seeds, …, classes)."""

        def of_one(params: dict[str, Tensor], batch: Tensor) -> Tensor:
            return functional_call(self.each, params, (batch,))

        if inputs.is_floating_point():
            inputs = inputs.to(next(self.parameters()).dtype)
        return torch.vmap(of_one)(dict(self.each.named_parameters()), inputs)

    def losses(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross entropy of each seed in nats, FP32."""
        logits, labels = self(batch[0]).float(), batch[1]
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(len(labels), -1).mean(1)

    @torch.no_grad()
    def accuracies(self, batches: Batches) -> Tensor:
        """The share of held-out labels that each seed has right, FP64."""
        parts = [(self(inputs).argmax(-1) == labels).flatten(1) for (inputs, labels), _ in batches.validation()]
        return torch.cat(parts, dim=1).double().mean(1)


class Arrays(NamedTuple):
    """Inputs and labels to train on, and others that are held out."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


def read(path: Path) -> Arrays:
    """The arrays `x_train`, `y_train`, `x_test` and `y_test` of an `.npz` file."""
    with np.load(path) as found:
        return Arrays(*(torch.from_numpy(found[name]) for name in Arrays._fields))


class Batches:
    """The batches of every step, for several seeds. They depend on seed and step alone."""

    def __init__(self, arrays: Arrays, seeds: list[int], size: int) -> None:
        self._arrays, self._seeds, self._size = arrays, seeds, size

    def of_step(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels with first dimensions (seeds, size)."""
        count = len(self._arrays.x_train)
        chosen = np.stack(
            [np.random.default_rng([seed, step]).integers(count, size=self._size) for seed in self._seeds]
        )
        rows = torch.from_numpy(chosen)
        return self._arrays.x_train[rows], self._arrays.y_train[rows]

    def validation(self) -> Iterator[tuple[tuple[Tensor, Tensor], int]]:
        """The same for all seeds and steps: inputs and labels in parts, and their numbers of rows."""
        for inputs, labels in zip(*(part.split(ROWS_AT_ONCE) for part in self._arrays[2:]), strict=True):
            yield tuple(part.expand(len(self._seeds), *part.shape) for part in (inputs, labels)), len(inputs)


def digits() -> Arrays:
    """Images of 8 × 8 pixels from scikit-learn; needs the extra `recipes`."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = torch.from_numpy(found.images[order]).float().div(16).unsqueeze(1)
    labels = torch.from_numpy(found.target[order]).long()
    return Arrays(images[:1400], labels[:1400], images[1400:], labels[1400:])


class ConvolutionalNet(nn.Sequential):
    """Three convolutions with group norms."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs, stride in ((1, 16, 1), (16, 32, 2), (32, 32, 2)):
            conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
            layers += [conv, nn.GroupNorm(4, outputs), nn.ReLU()]
        super().__init__(*layers, nn.Flatten(1), nn.Linear(128, 10))


def chunks_of_modules() -> Arrays:
    """Which of the 16 largest modules of the standard library 64 bytes are from; the last tenth of each is held out."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: (-path.stat().st_size, path.name))
    parts: list[list[Tensor]] = [[], [], [], []]
    for label, path in enumerate(paths[:16]):
        text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        limit = len(text) * 9 // 10
        for k, starts in ((0, torch.arange(0, limit - 64, 16)), (2, torch.arange(limit, len(text) - 64, 64))):
            parts[k].append(text[starts.unsqueeze(1) + torch.arange(64)])
            parts[k + 1].append(torch.full((len(starts),), label))
    return Arrays(*(torch.cat(part) for part in parts))


class Encoder(nn.Module):
    """Two blocks of attention over bytes, and a class from the mean of their hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(256, 48), nn.Parameter(0.1 * torch.randn(64, 48))
        self.norms = nn.ModuleList(nn.LayerNorm(48) for _ in range(5))
        self.qkv = nn.ModuleList(nn.Linear(48, 144) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))
        self.up, self.down = (nn.ModuleList(nn.Linear(*shape) for _ in range(2)) for shape in ((48, 192), (192, 48)))
        self.head = nn.Linear(48, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens) + self.places
        for k in range(2):
            heads = self.qkv[k](self.norms[2 * k](hidden)).unflatten(-1, (3, 4, 12))
            query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
            weights = ((query @ key.mT).float() * 12**-0.5).softmax(-1).to(value.dtype)
            hidden = hidden + self.out[k]((weights @ value).transpose(1, 2).flatten(2))
            hidden = hidden + self.down[k](F.gelu(self.up[k](self.norms[2 * k + 1](hidden))))
        return self.head(self.norms[4](hidden).mean(1))


USERS, ITEMS = 1000, 3000


def clicks() -> Arrays:
    """Users and items, most of which are rare, and whether a user clicks, from a hidden model of four factors."""
    generator = np.random.default_rng(0)
    factors = [generator.normal(size=(count, 4)) for count in (USERS, ITEMS)]
    pairs = np.stack([generator.zipf(1.2, 90_000) % count for count in (USERS, ITEMS)], axis=1)
    scores = (factors[0][pairs[:, 0]] * factors[1][pairs[:, 1]]).sum(1)
    labels = torch.from_numpy(generator.random(len(pairs)) < 1 / (1 + np.exp(-1.5 * scores))).long()
    inputs = torch.from_numpy(pairs)
    return Arrays(inputs[:80_000], labels[:80_000], inputs[80_000:], labels[80_000:])


class Recommender(nn.Module):
    """Embeddings of user and item, their product, and a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        self.net = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        return self.net(torch.cat([user, item, user * item], dim=1))


def sounds() -> Arrays:
    """Frames of eight channels that a chain of twelve hidden states emits with noise; the labels are the states."""
    generator = np.random.default_rng(0)
    chain = generator.dirichlet(np.full(12, 0.3), size=12) * 0.3 + 0.7 * np.eye(12)
    means, count, length = generator.normal(size=(12, 8)), 4500, 24
    states = np.empty((count, length), dtype=np.int64)
    states[:, 0] = generator.integers(12, size=count)
    for frame in range(1, length):
        drawn = generator.random(count)
        states[:, frame] = (chain[states[:, frame - 1]].cumsum(1) < drawn[:, None]).sum(1).clip(max=11)
    frames = torch.from_numpy(means[states] + 1.5 * generator.normal(size=(count, length, 8))).float()
    labels = torch.from_numpy(states)
    return Arrays(frames[:4000], labels[:4000], frames[4000:], labels[4000:])


class GRU(nn.Module):
    """A gated recurrent unit, written out, and a class for every frame."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.hidden, self.head = nn.Linear(8, 144), nn.Linear(48, 144), nn.Linear(48, 12)

    def forward(self, frames: Tensor) -> Tensor:
        seen = self.inputs(frames)
        hidden, outputs = torch.zeros_like(seen[:, 0, :48]), []
        for of_input in seen.unbind(1):
            of_hidden = self.hidden(hidden)
            reset, update = (of_input[:, :96] + of_hidden[:, :96]).sigmoid().chunk(2, -1)
            new = (of_input[:, 96:] + reset * of_hidden[:, 96:]).tanh()
            hidden = new + update * (hidden - new)
            outputs.append(hidden)
        return self.head(torch.stack(outputs, dim=1))
