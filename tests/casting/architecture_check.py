"""One model class, checked: what `cast_model` makes of it, and whether it trains as it does in FP32."""

import contextlib
import copy
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hf_lowprec
from tests.casting.inspection import BF16, FP32
from tests.casting.tiny_batches import Batch, offers
from tests.casting.tiny_configs import tiny_config

UNIT = 2.0**-8  # BF16 has 8 significant bits: rounding to nearest errs by at most this much of the value
TRAINS, FAILS, NO_REFERENCE = "trains", "fails", "no reference"


@dataclass(frozen=True)
class Outcome:
    """What became of one class."""

    kind: str  # TRAINS, FAILS, or NO_REFERENCE: it does not train in FP32 either
    note: str  # the reason, or what the batch lacks
    error: float = 0.0  # of the loss, in standard deviations of what rounding explains


def check(model_class: type, model_type: str, attention: str | None = None) -> Outcome:
    """Train a tiny `model_class` for a step in FP32 and, cast, in BF16."""
    try:
        config = tiny_config(model_class, model_type, attention)
        torch.manual_seed(0)
        model = without_chance(model_class(config))
    except Exception as error:
        return Outcome(NO_REFERENCE, _brief(error))
    fresh = copy.deepcopy(model)
    try:
        batch, note, loss, sigma = _reference(model)
    except RuntimeError as error:
        return Outcome(NO_REFERENCE, _brief(error))
    return compare(model, fresh, batch, note, loss, sigma)


def compare(exact: nn.Module, model: nn.Module, batch: Batch, note: str, loss: float, sigma: float) -> Outcome:
    """`exact` has trained on `batch`; `model` is its copy from before, which is cast and does the same."""
    ties = tie_pattern(model)
    try:
        hf_lowprec.cast_model(model)
        wrong = dtype_faults(exact, model)
        if tie_pattern(model) != ties:
            wrong.append("ties were lost")
        with norm_outputs(model) as seen:
            torch.manual_seed(2)
            got = loss_of(model(**batch))
        wrong += [f"{name} returns {dtype}" for name, dtype in seen.items() if dtype != BF16]
        got.backward()
    except Exception as error:
        return Outcome(FAILS, _brief(error))
    tolerance = 4 * sigma + (3 * UNIT * abs(loss) if got.dtype == BF16 else 0.0)
    ratio = abs(got.item() - loss) / max(sigma, 1e-30)
    if not math.isfinite(got.item()) or abs(got.item() - loss) > tolerance:
        wrong.append(f"loss {got.item():.6g}, in FP32 {loss:.6g}: {ratio:.1f} standard deviations")
    wrong += gradient_faults(exact, model)
    try:
        hf_lowprec.AdamW(model.parameters(), lr=1e-3, backend="eager").step()
    except Exception as error:
        wrong.append(_brief(error))
    return Outcome(FAILS, "; ".join(wrong[:3]), ratio) if wrong else Outcome(TRAINS, note, ratio)


def _reference(model: nn.Module) -> tuple[Batch, str, float, float]:
    """The first batch on which `model` trains in FP32, its note, the loss, and how far rounding moves the loss."""
    first: Exception | None = None
    for note, batch in offers(model):
        model.zero_grad()
        state = torch.random.get_rng_state()
        try:
            with sensitivity(model) as moved:
                torch.manual_seed(2)
                loss = loss_of(model(**batch))
                loss.backward()
        except Exception as error:
            first = first or error
            continue
        finally:
            torch.random.set_rng_state(state)
        if loss.isfinite() and any(p.grad is not None and p.grad.any() for p in model.parameters()):
            return batch, note, loss.item(), moved()
        first = first or ValueError(f"loss {loss.item()} without gradients")
    raise RuntimeError(_brief(first) if first else "no batch is known")


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


def loss_of(output: Any) -> Tensor:
    """The model's own loss; of a model without one the mean square of everything differentiable it returns."""
    for name in ("loss", "loss_value"):
        loss = getattr(output, name, None)
        if isinstance(loss, Tensor) and loss.requires_grad:
            return loss if loss.dim() == 0 else loss.sum()
    values = [t.float().square().mean() for t in tensors_in(output) if t.requires_grad]
    if not values:
        raise ValueError("nothing in the output is differentiable")
    return torch.stack(values).sum()


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
    uniform in ±u|x| have variance (u x g)² / 3. Summed over every weight and every value that a module returns,
    where each module is taken to round three times (its own result, and two values on the way: of an attention,
    a residual sum, a product).
    """
    squares: list[Tensor] = []
    ids: set[int] = set()

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.dim() and id(tensor) not in ids:
                ids.add(id(tensor))
                value = tensor.detach().clone()
                tensor.register_hook(lambda g, value=value: squares.append((g * value).double().square().sum()))
                alive.append(tensor)

    alive: list[Tensor] = []
    handles = [module.register_forward_hook(watch) for module in model.modules()]

    def total() -> float:
        activations = float(sum(squares))
        weights = sum(float((p * p.grad).double().square().sum()) for p in model.parameters() if p.grad is not None)
        return UNIT * math.sqrt((3 * activations + weights) / 3)

    try:
        yield total
    finally:
        for handle in handles:
            handle.remove()


def is_norm(module: nn.Module) -> bool:
    """By the class's name, and nothing in it but itself; the code under test goes by more."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def dtype_faults(exact: nn.Module, model: nn.Module) -> list[str]:
    """Tensors that are not in the dtype they should be in, or lost bits they should have."""
    wide = set[str]()
    for name, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if is_norm(module) or "inv_freq" in str([n for n, _ in own]):
            wide |= {f"{name}.{leaf}".lstrip(".") for leaf, _ in own}
    patterns = [
        p for a in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict") for p in getattr(model, a, None) or ()
    ]
    search = re.compile("|".join(p.replace("*", ".*") for p in patterns)).search if patterns else lambda _: None
    found = []
    before = dict(exact.named_parameters()) | dict(exact.named_buffers())
    shared = {id(t) for n, t in (*model.named_parameters(), *model.named_buffers()) if n in wide or search(n)}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point():
            continue
        if id(tensor) in shared:
            if tensor.dtype != FP32:
                found.append(f"{name} is {tensor.dtype}")
            elif not tensor.requires_grad and not torch.equal(tensor, before[name]) and "running" not in name:
                found.append(f"{name} has changed")
        elif tensor.dtype != BF16:
            found.append(f"{name} is {tensor.dtype}")
    return found


@contextlib.contextmanager
def norm_outputs(model: nn.Module) -> Iterator[dict[str, torch.dtype]]:
    """While it lasts: norm module -> dtype of what it returns."""
    seen: dict[str, torch.dtype] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen.update({name: t.dtype for t in tensors_in(output)})

        return hook

    handles = [m.register_forward_hook(watch(n)) for n, m in model.named_modules() if is_norm(m)]
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
