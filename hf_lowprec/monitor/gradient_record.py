"""Records which parameters had gradients in the measured steps, and finds where a missing gradient is a mistake."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hf_lowprec.optim.gradients.collector import GradientCollector
from hf_lowprec.tensor_names import layer_number, name_pattern

ENOUGH_MEASUREMENTS = 3
"""Measured steps without a gradient after which a tensor is said to have none. The first is not enough: `lora_A` has a
gradient of zero until `lora_B` has moved, and a router may send nothing to an expert."""
_FREEZE = "if they are not meant to be trained, set requires_grad=False"
_DETACHED = f"Look for detach() or torch.no_grad() around what is computed from them; {_FREEZE}"


@dataclass
class ParameterGradients:
    """The gradients of a parameter in the measured steps.

    Attributes:
        name: the name of the parameter.
        param: the parameter.
        in_optimizer: whether the optimizer steps it.
        in_model: whether it is in the model; true if the model is not known.
        present: whether it has had a gradient.
        nonzero: whether it has had a nonzero gradient; False for parameters that the optimizer does not step.
    """

    name: str
    param: Tensor
    in_optimizer: bool
    in_model: bool
    present: bool = False
    nonzero: bool = False


class GradientRecord:
    """The gradients of all parameters in the measured steps.

    In a quarter of transformers' model classes, some parameters have none by design: BERT's pooler if the loss does not
    use it, the last layer of LLaVA's vision tower, the cross-attention of a decoder on its own, an image tower while
    all inputs are texts. So a missing gradient alone is no reason to warn.

    Attributes:
        steps: the number of measured steps.
        rows: the gradients of the optimizer's parameters, in its order, then those of trainable parameters that it
            lacks, if it has more than half of them. An optimizer with fewer was given only these on purpose: another
            one trains the rest, or nothing does.

    Args:
        names: the names of the optimizer's parameters.
        params: these parameters.
        model: the model, if it is known.
    """

    def __init__(self, names: Sequence[str], params: Sequence[Tensor], model: nn.Module | None) -> None:
        self.steps = 0
        in_model, stepped = None if model is None else {*model.parameters()}, {*params}
        self.rows = [
            ParameterGradients(name, param, True, in_model is None or param in in_model)
            for name, param in zip(names, params, strict=True)
        ]
        if model is not None:
            trainable = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
            left_out = [(name, param) for name, param in trainable if param not in stepped]
            if 2 * len(left_out) < len(trainable):
                self.rows += [ParameterGradients(name, param, False, True) for name, param in left_out]

    def present_now(self, collector: GradientCollector | None) -> list[bool]:
        """Return which parameters have a gradient now, in the order of `rows`.

        Args:
            collector: the collector whose gradients are no longer in `param.grad`.
        """
        taken = (lambda param: False) if collector is None else collector.has_taken
        return [row.param.grad is not None or taken(row.param) for row in self.rows]

    def add(self, present: Sequence[bool], nonzero: Sequence[bool]) -> None:
        """Add a measured step.

        Args:
            present: the result of `present_now` before the step.
            nonzero: for each parameter of the optimizer, whether its gradient was not zero.
        """
        self.steps += 1
        for row, is_present in zip(self.rows, present, strict=True):
            row.present |= is_present
        for row, is_nonzero in zip(self.rows, nonzero, strict=False):
            row.nonzero |= is_nonzero

    def mistakes(self) -> Iterator[tuple[list[str] | None, str, str]]:
        """Yield names of parameters (None is all of them), which gradients they had or lacked, and what to do."""
        if self.steps < ENOUGH_MEASUREMENTS:
            return
        ours = [row for row in self.rows if row.in_optimizer]
        missing = [row for row in ours if not row.present]
        if not any(row.nonzero for row in ours) and len(missing) < len(ours):
            yield (
                None,
                f"all gradients were exactly zero in each of {self.steps} measured steps, so the loss is constant",
                "Look for rewards that are all the same, which in GRPO give advantages of zero, or for a loss that is "
                "multiplied by zero",
            )
        no_gradient = f"{{names}} had no gradient in any of {self.steps} measured steps"
        yield (
            [row.name for row in ours if row.present and not row.nonzero],
            f"{{names}} had a gradient of zeros in all of {self.steps} measured steps",
            f"Look for outputs that are masked or multiplied by zero; {_FREEZE}",
        )
        yield (
            [row.name for row in missing if not row.in_model],
            f"{no_gradient} and are not in the model",
            "Build the optimizer after what replaces parameters, such as model.resize_token_embeddings",
        )
        if missing:  # rarely, and names take time
            # A task leaves last layers unused, and `detach()` cuts off first layers.
            last_layer: dict[str, int] = defaultdict(lambda: -1)  # that has had a gradient, by pattern of names
            for pattern, layer in ((name_pattern(row.name), layer_number(row.name)) for row in ours if row.present):
                last_layer[pattern] = max(last_layer[pattern], layer)
            yield (
                [row.name for row in missing if layer_number(row.name) < last_layer[name_pattern(row.name)]],
                f"{no_gradient}, although the same weights of later layers had one",
                _DETACHED,
            )
        if 2 * sum(row.param.numel() for row in missing) > sum(row.param.numel() for row in ours):
            yield [row.name for row in missing], f"{no_gradient} and are more than half of all weights", _DETACHED
        yield (
            [row.name for row in self.rows if row.present and not row.in_optimizer],
            "{names} have gradients but are not among the optimizer's parameters",
            f"Pass them to the optimizer; {_FREEZE}",
        )
