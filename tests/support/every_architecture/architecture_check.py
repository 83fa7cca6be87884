"""Check one model class: what `cast_model` makes of it, and whether it trains as it does in FP32."""

import contextlib
import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hf_lowprec
from hf_lowprec.casting.listed_classes import CLASSES_COMPUTING_IN_FP32
from hf_lowprec.casting.losses import upcast_predictions
from tests.support.broken_layers import Batch, broken_layers
from tests.support.models.inspection import BF16, FP32, bits

UNIT = 2.0**-8  # BF16 has 8 significant bits: rounding to nearest errs by at most this much of the value
BIASES_OF_EXPERTS = {"e_score_correction_bias", "expert_bias", "balancing_biases"}
TRAINS, FAILS, NO_REFERENCE = "trains", "fails", "no reference"


@dataclass(frozen=True)
class Outcome:
    """The result for one class."""

    kind: str  # TRAINS, FAILS, or NO_REFERENCE: it does not train in FP32 either
    note: str  # the reason, or what the batch lacks
    error: float = 0.0  # of the loss, in tolerances
    broken: tuple[str, ...] = ()  # layers that are wrong on this machine and were kept in FP32


def check(model_class: type, model_type: str, attention: str | None = None) -> Outcome:
    """Train a tiny `model_class` of transformers for a step in FP32 and, cast, in BF16."""
    from tests.support.every_architecture.batch_exceptions import DISCRETE
    from tests.support.every_architecture.tiny_batches import offers

    try:
        model = tiny_model(model_class, model_type, attention)
    except Exception as error:
        return Outcome(NO_REFERENCE, _brief(error))
    return check_model(model, offers(model), is_discrete=model_class.__name__ in DISCRETE)


def tiny_model(model_class: type, model_type: str, attention: str | None = None, **fields: Any) -> Any:
    """A tiny model of transformers without dropout, with these fields of its config."""
    from tests.support.every_architecture.tiny_configs import tiny_config

    config = tiny_config(model_class, model_type, attention)
    for name, value in fields.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return without_chance(model_class(config))


def check_model(model: nn.Module, batches: Iterable[tuple[str, Batch]], is_discrete: bool = False) -> Outcome:
    """Train copies of any FP32 model for a step on the first batch that it takes: in FP32 and, cast, in BF16.

    If they differ and a layer is broken on this machine, once more with that layer in FP32.
    """
    exact = without_chance(copy.deepcopy(model))
    try:
        batch, note, loss, tolerance = _reference(exact, batches)
    except Exception as error:
        return Outcome(NO_REFERENCE, _brief(error))
    reference = exact, batch, note, loss, math.inf if is_discrete else tolerance
    outcome = compare(without_chance(copy.deepcopy(model)), *reference)
    if outcome.kind == FAILS and (broken := broken_layers(exact, batch)):
        outcome = compare(without_chance(copy.deepcopy(model)), *reference, keep_fp32=broken)
        outcome = replace(outcome, broken=broken)
    return outcome


def compare(
    model: nn.Module,
    exact: nn.Module,
    batch: Batch,
    note: str,
    loss: float,
    tolerance: float,
    keep_fp32: tuple[str, ...] = (),
) -> Outcome:
    """`exact` has trained on `batch`; `model` is its copy from before, which is cast and does the same."""
    ties, before, parameters = tie_pattern(model), bits(model), list(map(id, model.parameters()))
    try:
        report = hf_lowprec.cast_model(model, keep_fp32=keep_fp32)
        wrong = dtype_faults(before, model, keep_fp32)
        if tie_pattern(model) != ties or list(map(id, model.parameters())) != parameters:
            wrong.append("ties or parameters were lost")
        with norm_outputs(model) as seen:
            torch.manual_seed(2)
            got, _ = loss_of(model(**batch))
        wrong += [f"{name} returns {dtype}" for name, dtype in seen.items() if dtype != BF16]
        got.backward()
    except Exception as error:
        return Outcome(FAILS, _brief(error))
    # A loss computed in BF16 rounds log-probability, mean and result. It is where the model has no loss function that
    # gets FP32, or passes it by: then the loss is a number of BF16.
    halves = "" not in report.losses or torch.equal(got, got.to(BF16).to(got.dtype))
    tolerance += 3 * UNIT * abs(loss) if halves else 0.0
    ratio = abs(got.item() - loss) / max(tolerance, 1e-30)
    if not math.isfinite(got.item()) or ratio > 1:
        wrong.append(f"loss {got.item():.6g}, in FP32 {loss:.6g}: {ratio:.1f} times what rounding explains")
    wrong += gradient_faults(exact, model)
    try:
        hf_lowprec.AdamW(model.parameters(), lr=1e-3).step()
        upcast_predictions(model, BF16)  # as under Trainer
        loss_of(model(**batch))[0].backward()
    except Exception as error:
        wrong.append(_brief(error))
    return Outcome(FAILS, "; ".join(wrong[:3]), ratio) if wrong else Outcome(TRAINS, note, ratio)


def _reference(model: nn.Module, batches: Iterable[tuple[str, Batch]]) -> tuple[Batch, str, float, float]:
    """The first batch on which `model` trains in FP32, its note, the loss, and how far rounding may move the loss."""
    first: Exception | None = None
    for note, batch in batches:
        inputs = [name for name, value in batch.items() if is_rounded(name, value)]
        for traced in (inputs, []) if inputs else ([],):
            model.zero_grad()
            state = torch.random.get_rng_state()
            leaves = {name: batch[name].clone().requires_grad_() for name in traced}
            try:
                with sensitivity(model) as moved:
                    torch.manual_seed(2)
                    # Clones, because a model may change its inputs in place.
                    output = model(**batch | {name: value.clone() for name, value in leaves.items()})
                    loss, own = loss_of(output)
                    if traced and not own:
                        continue  # what is differentiable in the output must not depend on what is traced
                    loss.backward()
            except Exception as error:
                first = first or error
                continue
            finally:
                torch.random.set_rng_state(state)
            if loss.isfinite() and any(p.grad is not None and p.grad.any() for p in model.parameters()):
                # A mean square moves by twice what its values do, even if all of them are equal.
                tolerance = 4 * moved(list(leaves.values())) + (0 if own else 2 * UNIT * loss.item())
                return batch, note, loss.item(), tolerance
            first = first or ValueError(f"loss {loss.item()} without gradients")
    raise RuntimeError(_brief(first) if first else "no batch is known")


def is_rounded(name: str, value: Any) -> bool:
    """Whether an input is rounded on its way into the model, and a gradient can say how much that matters."""
    exempt = "label" in name or "target" in name or "mask" in name
    return isinstance(value, Tensor) and value.is_floating_point() and not exempt


def without_chance(model: nn.Module) -> nn.Module:
    """In training mode, with every dropout at zero, and batch norms that do not depend on a batch of two."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Drop" in type(module).__name__)):
                setattr(module, name, 0.0)
    return model


def loss_of(output: Any) -> tuple[Tensor, bool]:
    """The model's own loss, and True; or the mean square of everything differentiable it returns, and False."""
    for name in ("loss", "loss_value"):
        loss = getattr(output, name, None)
        if isinstance(loss, Tensor) and loss.requires_grad:
            return (loss if loss.dim() == 0 else loss.sum()), True
    values = [t.float().square().mean() for t in tensors_in(output) if t.requires_grad]
    if not values:
        raise ValueError("nothing in the output is differentiable")
    return torch.stack(values).sum(), False


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The floating tensors in an output."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict | tuple | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


@contextlib.contextmanager
def sensitivity(model: nn.Module) -> Iterator[Any]:
    """How far rounding to BF16 moves the loss: a standard deviation, to first order in the unit roundoff.

    Rounding a value x moves it by at most u|x|, and the loss by the gradient times that; independent errors that are
    uniform in ±u|x| have variance (u x g)² / 3. Summed over every weight, input and value that a module returns,
    where each module is taken to round three times (its own result, and two values on the way: of an attention,
    a residual sum, a product).
    """
    squares: list[Tensor] = []
    ids: set[int] = set()

    def add(value: Tensor, gradient: Tensor | None) -> None:
        if gradient is not None:
            squares.append((gradient * value).double().square().sum())

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.dim() and id(tensor) not in ids:
                ids.add(id(tensor))
                value = tensor.detach().clone()
                tensor.register_hook(partial(add, value))
                alive.append(tensor)

    alive: list[Tensor] = []
    handles = [module.register_forward_hook(watch) for module in model.modules()]

    def total(inputs: list[Tensor]) -> float:
        activations = float(sum(squares))
        leaves = [t for t in (*model.parameters(), *inputs) if t.grad is not None]
        values = sum((t * t.grad).double().square().sum().item() for t in leaves)
        return UNIT * math.sqrt((3 * activations + values) / 3)

    try:
        yield total
    finally:
        for handle in handles:
            handle.remove()


def is_norm(module: nn.Module) -> bool:
    """By the class's name, and nothing in it but its own tensors; the code under test goes by more."""
    own = sum(1 for _ in module.parameters(recurse=False)) + sum(1 for _ in module.buffers(recurse=False))
    below = sum(1 for _ in module.parameters()) + sum(1 for _ in module.buffers())
    other = nn.Linear | nn.Embedding | nn.modules.conv._ConvNd
    return "norm" in type(module).__name__.lower() and own == below > 0 and not isinstance(module, other)


def is_norm_of(parent: nn.Module, norm: nn.Module) -> bool:
    """Whether a module is a norm by name and has no tensors except those of the norm inside it."""
    same = [id(t) for t in parent.parameters()] == [id(t) for t in norm.parameters()]
    return parent is not norm and same and "norm" in type(parent).__name__.lower()


def dtype_faults(before: dict[str, Tensor], model: nn.Module, kept: tuple[str, ...] = ()) -> list[str]:
    """Tensors that are not in the dtype they should be in, or lost bits they should have."""
    wide = {f"{name}.{leaf}" for name in kept for leaf, _ in model.get_submodule(name).named_parameters()}
    for name, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        names = {leaf for leaf, _ in own}
        loss = type(module).__name__.endswith("Loss") and not any(p.dim() for p in module.parameters())
        rotary = not module._parameters and re.search("rotary|rope", type(module).__name__.lower())
        frequencies = rotary or "Fourier" in type(module).__name__ or any("inv_freq" in leaf for leaf in names)
        if is_norm(module) or frequencies or loss:
            wide |= {f"{name}.{leaf}".lstrip(".") for leaf in names}
        wide |= {f"{name}.{leaf}".lstrip(".") for leaf in names & BIASES_OF_EXPERTS}
        if type(module).__name__ in CLASSES_COMPUTING_IN_FP32:
            wide |= {f"{name}.{leaf}".lstrip(".") for leaf, _ in (*module.named_parameters(), *module.named_buffers())}
    search = kept_by_the_model(model)
    found = []
    shared = {id(t) for n, t in (*model.named_parameters(), *model.named_buffers()) if n in wide or search(n)}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point():
            continue
        if id(tensor) in shared:
            if tensor.dtype != FP32:
                found.append(f"{name} is {tensor.dtype}")
            elif not torch.equal(tensor, before[name].to(FP32)):  # of a few, numpy made FP64
                found.append(f"{name} has changed")
        elif tensor.dtype != BF16:
            found.append(f"{name} is {tensor.dtype}")
    return found


def kept_by_the_model(model: nn.Module) -> Callable[[str], Any]:
    """Searches a name for what the model's class wants in FP32."""
    attributes = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    patterns = [p.replace("*", ".*") for a in attributes for p in getattr(model, a, None) or ()]
    return re.compile("|".join(patterns) or "(?!)").search


@contextlib.contextmanager
def norm_outputs(model: nn.Module) -> Iterator[dict[str, torch.dtype]]:
    """While it lasts: norm module -> dtype of what it returns."""
    seen: dict[str, torch.dtype] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in tensors_in(output):
                if seen.setdefault(name, tensor.dtype) == BF16:
                    seen[name] = tensor.dtype

        return hook

    # Inside a module that is kept as a whole everything is FP32.
    kept = kept_by_the_model(model)
    norms = [(n, m) for n, m in model.named_modules() if is_norm(m) and not kept(n)]
    # A wrapper of a norm and of nothing else, itself a norm by name, has the hooks in its place.
    parts = dict(model.named_modules())
    norms = [(n, m) for n, m in norms if not is_norm_of(parts[n.rpartition(".")[0]], m)]
    handles = [m.register_forward_hook(watch(n)) for n, m in norms]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def gradient_faults(exact: nn.Module, model: nn.Module) -> list[str]:
    """Parameters that got a finite gradient in FP32 and none, or not a finite one of their own dtype, in BF16."""
    found = []
    for (name, one), (_, two) in zip(exact.named_parameters(), model.named_parameters(), strict=True):
        if one.grad is None or not one.grad.isfinite().all():
            continue
        if two.grad is None:
            found.append(f"{name} has no gradient")
        elif two.grad.dtype != two.dtype or not two.grad.isfinite().all():
            found.append(f"{name} has a gradient of {two.grad.dtype} that is not finite")
    return found


def tie_pattern(model: nn.Module) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return sorted(groups.values())


def _brief(error: BaseException) -> str:
    text = re.sub(r"\s+", " ", str(error)).strip()
    return f"{type(error).__name__}: {text[:200]}"
