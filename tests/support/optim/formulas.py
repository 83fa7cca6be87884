"""One step of every algorithm in FP64: torch's own class, or the paper's formula written out.

A formula is `(weight, grad, state, step, group) -> (new weight, new states)` for one tensor. `state` is what is stored
before the step, `step` counts from 1, and `group` is the param group. Muon, whose matrix products are in BF16, has
tests of its own.
"""

import inspect
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

EPS = 2.0**-24
"""Half an ulp of FP32, relative."""
States = dict[str, Tensor]
Formula = Callable[[Tensor, Tensor, States, int, dict[str, Any]], tuple[Tensor, States]]


def rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item() if values.numel() else 0.0


def of_torch(name: str) -> Formula:
    """A step of torch's class of this name."""
    cls = getattr(torch.optim, name)

    def step(weight: Tensor, grad: Tensor, state: States, count: int, group: dict[str, Any]) -> tuple[Tensor, States]:
        param = nn.Parameter(weight.clone())
        options = {key: group[key] for key in inspect.signature(cls).parameters if key in group and key != "params"}
        optimizer = cls([param], **options | {"lr": float(group["lr"])})
        if count > 1:
            optimizer.state[param] = {"step": torch.tensor(count - 1.0), **state}
        param.grad = grad
        optimizer.step()
        found = optimizer.state[param].items()
        return param.detach(), {name: value for name, value in found if name != "step" and value is not None}

    return step


def either(formula: Formula, factored: Formula) -> Formula:
    """The second one for groups with `factored=True`."""
    return lambda *arguments: (factored if arguments[-1].get("factored") else formula)(*arguments)


def of_paper(formula: Callable[..., tuple[Tensor, States]]) -> Formula:
    """A formula that minimizes, with attributes in place of keys."""

    def step(weight: Tensor, grad: Tensor, state: States, count: int, group: dict[str, Any]) -> tuple[Tensor, States]:
        options = SimpleNamespace(**group | {"lr": float(group["lr"])})
        return formula(weight, -grad if group["maximize"] else grad, state, count, options)

    return step


def adafactor(weight, grad, state, t, options):
    """Shazeer and Stern, arXiv:1804.04235, Alg. 4 to 6, with the options of torch's and transformers' classes."""
    beta2, square = 1 - t**options.beta2_decay, grad.square() + options.square_eps
    least = 2.0**-23 if options.eps[0] is None else options.eps[0]
    new = {}
    if grad.ndim > 1:
        for name, dim in (("row_var", -1), ("col_var", -2)):
            new[name] = beta2 * state[name] + (1 - beta2) * square.mean(dim, keepdim=True)
        variance = new["row_var"] / new["row_var"].mean(-2, keepdim=True).clamp(min=least) * new["col_var"]
    else:
        variance = new["variance"] = beta2 * state["variance"] + (1 - beta2) * square
    change = grad / variance.sqrt().clamp(min=least)
    change = (
        change
        / max(1.0, rms(change) / options.d)
        * (max(options.eps[1], rms(weight)) if options.scale_parameter else 1)
    )
    change = change * (min(options.lr, t**-0.5) if options.relative_step else options.lr)
    if options.beta1 is not None:
        change = new["exp_avg"] = options.beta1 * state["exp_avg"] + (1 - options.beta1) * change
    return (1 - options.lr * options.weight_decay) * weight - change, new


def factored_adam(weight, grad, state, t, options):
    """Kingma and Ba, arXiv:1412.6980, Alg. 1, with the second moment of Shazeer and Stern, arXiv:1804.04235, Alg. 2."""
    (beta1, beta2), decay, decoupled = (
        options.betas,
        options.weight_decay,
        getattr(options, "decoupled_weight_decay", True),
    )
    grad = grad if decoupled else grad + decay * weight
    new = {"exp_avg": beta1 * state["exp_avg"] + (1 - beta1) * grad}
    if grad.ndim > 1 and 4 * sum(grad.shape[-2:]) < 2 * math.prod(grad.shape[-2:]):  # bytes
        for name, dim in (("exp_avg_sq_row", -1), ("exp_avg_sq_col", -2)):
            new[name] = beta2 * state[name] + (1 - beta2) * grad.square().mean(dim, keepdim=True)
    else:
        new["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad.square()
    denominator = (second_moment(new) / (1 - beta2**t)).sqrt() + options.eps
    change = options.lr * new["exp_avg"] / (1 - beta1**t) / denominator
    return weight * (1 - options.lr * decay * decoupled) - change, new


def second_moment(state: States) -> Tensor:
    """That of Adam's states, from means over rows and columns where there are some."""
    if "exp_avg_sq_row" not in state:
        return state["max_exp_avg_sq" if "max_exp_avg_sq" in state else "exp_avg_sq"]
    row, smallest = state["exp_avg_sq_row"], torch.finfo(torch.float32).tiny
    return row / row.mean(-2, keepdim=True).clamp(min=smallest) * state["exp_avg_sq_col"]


def adan(weight, grad, state, t, options):
    """Xie et al., arXiv:2208.06677, Alg. 1 without restarts.

    Betas are one minus the paper's, moments start at zero and are bias-corrected, and the first difference is zero, all
    as in the authors' code.
    """
    beta1, beta2, beta3 = options.betas
    difference = grad - state["previous_grad"] if t > 1 else torch.zeros_like(grad)
    m = beta1 * state["exp_avg"] + (1 - beta1) * grad
    v = beta2 * state["exp_avg_diff"] + (1 - beta2) * difference
    n = beta3 * state["exp_avg_sq"] + (1 - beta3) * (grad + beta2 * difference).square()
    step_size, decay = options.lr / ((n / (1 - beta3**t)).sqrt() + options.eps), options.lr * options.weight_decay
    change = step_size * (m / (1 - beta1**t) + beta2 * v / (1 - beta2**t))
    new_weight = (1 - decay) * weight - change if options.no_prox else (weight - change) / (1 + decay)
    return new_weight, {"exp_avg": m, "exp_avg_diff": v, "exp_avg_sq": n, "previous_grad": grad}


def lion(weight, grad, state, t, options):
    """Chen et al., arXiv:2302.06675, Alg. 2. NaN where rounding errors in FP32, three of each term, decide the sign."""
    beta1, beta2 = options.betas
    terms = torch.stack([beta1 * state["exp_avg"], (1 - beta1) * grad])
    sign = terms.sum(0).sign()
    sign[(sign != 0) & (terms.sum(0).abs() <= 4 * EPS * terms.abs().sum(0))] = torch.nan
    change = options.lr * (sign + options.weight_decay * weight)
    return weight - change, {"exp_avg": beta2 * state["exp_avg"] + (1 - beta2) * grad}


def prodigy(weight, grad, state, t, options):
    """Mishchenko and Defazio, arXiv:2306.06101, Alg. 4, for a given d; sums are in units of d0, as in their package."""
    (beta1, beta2), d = options.betas, options.d
    rate = d * options.lr
    if options.use_bias_correction:
        rate *= (1 - beta2**t) ** 0.5 / (1 - beta1**t)
    m = beta1 * state["exp_avg"] + (1 - beta1) * d * grad
    v = beta2 * state["exp_avg_sq"] + (1 - beta2) * (d * grad).square()
    s = beta2**0.5 * state["s"] + d / options.d0 * (d if options.safeguard_warmup else rate) * grad
    change = rate * (m / (v.sqrt() + d * options.eps) + options.weight_decay * weight)
    return weight - change, {"exp_avg": m, "exp_avg_sq": v, "s": s, "p0_minus_p": state["p0_minus_p"] + change}


def schedule_free_adamw(weight, grad, state, t, options):
    """Defazio et al., arXiv:2405.15682, Alg. 1, with x, y and z. `weight` is y, and the state `z - y = β1·(z - x)`."""
    beta1, beta2 = options.betas

    def rate(k: int) -> float:
        return min(1.0, k / max(options.warmup_steps, 1)) * (1 - beta2**k) ** 0.5

    share = rate(t) ** 2 / sum(rate(k) ** 2 for k in range(1, t + 1))
    x, z = weight + state["z_minus_y"] * (1 - 1 / beta1), weight + state["z_minus_y"]
    v = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad.square()
    z = z - options.lr * rate(t) * (grad / (v.sqrt() + options.eps) + options.weight_decay * weight)
    x = (1 - share) * x + share * z
    return (1 - beta1) * z + beta1 * x, {"exp_avg_sq": v, "z_minus_y": beta1 * (z - x)}


def stable_adamw(weight, grad, state, t, options):
    """Wortsman et al., arXiv:2304.13013, Alg. 2."""
    beta1, beta2 = (beta * (1 - beta ** (t - 1)) / (1 - beta**t) for beta in options.betas)
    m = beta1 * state["exp_avg"] + (1 - beta1) * grad
    v = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad.square()
    lr = options.lr / max(1.0, (grad / v.sqrt().clamp(min=options.eps)).square().mean().sqrt().item())
    change = m / (v.sqrt() + options.eps) + options.weight_decay * weight
    return weight - lr * change, {"exp_avg": m, "exp_avg_sq": v}


FORMULAS = {name: either(of_torch(name), of_paper(factored_adam)) for name in ("Adam", "AdamW")}
FORMULAS |= {name: of_torch(name) for name in ("RAdam", "SGD")}
FORMULAS |= {"Adafactor": of_paper(adafactor), "Adan": of_paper(adan), "Lion": of_paper(lion)}
FORMULAS |= {"Prodigy": of_paper(prodigy), "ScheduleFreeAdamW": of_paper(schedule_free_adamw)}
FORMULAS |= {"StableAdamW": of_paper(stable_adamw)}

# Error feedback.


def coming_corrections(beta: float, t: int) -> float:
    """The bias correction `1/(1-βˢ)` of steps `s > t`, averaged with weights `βˢ`: integrals from `t + 1/2`."""
    z = beta ** (t + 0.5)
    return -math.log1p(-z) / z


def adams(state: States, grad: Tensor, t: int, group: dict[str, Any]) -> Tensor:
    second, (beta1, beta2) = second_moment(state), group["betas"]
    return group["lr"] * coming_corrections(beta1, t) / ((second / (1 - beta2**t)).sqrt() + group["eps"])


def radams(state: States, grad: Tensor, t: int, group: dict[str, Any]) -> Tensor:
    """Nothing in its first phase, which divides by nothing, so that nobody knows what the steps after it will add."""
    beta1, beta2 = group["betas"]
    longest = 2 / (1 - beta2) - 1
    length, coming = (longest - 2 * k * beta2**k / (1 - beta2**k) for k in (t, t + 1 / (1 - beta1)))
    if length <= 5:
        return torch.full_like(grad, torch.inf)
    rectified = (coming - 4) * (coming - 2) * longest / ((longest - 4) * (longest - 2) * coming)
    denominator = (state["exp_avg_sq"].sqrt() + group["eps"]) / (1 - beta2**t) ** 0.5
    return group["lr"] * coming_corrections(beta1, t) * rectified**0.5 / denominator


def adans(state: States, grad: Tensor, t: int, group: dict[str, Any]) -> Tensor:
    beta1, _, beta3 = group["betas"]
    shrink = 1 if group["no_prox"] else 1 / (1 + group["lr"] * group["weight_decay"])
    denominator = (state["exp_avg_sq"] / (1 - beta3**t)).sqrt() + group["eps"]
    return group["lr"] * shrink * coming_corrections(beta1, t) / denominator


def prodigys(state: States, grad: Tensor, t: int, group: dict[str, Any]) -> Tensor:
    (beta1, beta2), d = group["betas"], group["d"]
    correction = (1 - beta2**t) ** 0.5 * coming_corrections(beta1, t) if group["use_bias_correction"] else 1
    return d * group["lr"] * correction / (state["exp_avg_sq"].sqrt() + d * group["eps"])


def stable_adamws(state: States, grad: Tensor, t: int, group: dict[str, Any]) -> Tensor:
    """Its decay rate is `β·(1-βᵏ⁻¹)/(1-βᵏ)`, so that `n` steps leave `βⁿ·(1-βᵗ)/(1-βᵗ⁺ⁿ)` of the momentum."""
    beta1, root = group["betas"][0], state["exp_avg_sq"].sqrt()
    clipped = max(1.0, rms(grad / root.clamp(min=group["eps"])))
    return group["lr"] / clipped * (1 - beta1**t) * coming_corrections(beta1, t) / (root + group["eps"])


def sgds(state: States, grad: Tensor, t: int, group: dict[str, Any]) -> Tensor:
    return torch.full_like(grad, group["lr"] * (group["momentum"] if group["nesterov"] else 1))


ADDED = {"Adam": adams, "AdamW": adams, "RAdam": radams, "Adan": adans, "Prodigy": prodigys, "SGD": sgds}
ADDED |= {"StableAdamW": stable_adamws, "Adafactor": lambda state, grad, t, group: torch.ones_like(grad)}
"""By algorithm: what a momentum of -1 adds to a weight in a coming step, on average over these steps."""


def momentum_for(name: str, state: States, grad: Tensor, t: int, group: dict[str, Any]) -> tuple[str, Tensor | float]:
    """A momentum's name, and how much of it adds -1 in all, with which error feedback multiplies; 0 without it."""
    decay = group["betas"][0] if "betas" in group else group["momentum"] if name == "SGD" else group.get("beta1")
    if not decay or name not in ADDED or group["rounding"] != "stochastic":
        return "", 0.0
    added = ADDED[name](state, grad, t, group | {"lr": float(group["lr"])})
    return "momentum_buffer" if name == "SGD" else "exp_avg", (1 - decay) / decay / added
