"""Which trained parameters have no gradients, and of which of these one can tell that it is a mistake.

In a quarter of transformers' model classes, some parameters have none by design: BERT's pooler if the loss does not use
it, the last layer of LLaVA's vision tower, the cross-attention of a decoder on its own, an image tower while all inputs
are texts. So a missing gradient alone is no reason to warn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from hf_lowprec.tensor_names import layer_number, name_pattern


class GradientRecord:
    """Which parameters have had gradients in the measured steps.

    Attributes:
        steps: the number of measured steps.
        present: for each parameter of the optimizer, whether it has had a gradient.
        nonzero: whether it has had one that is not zero.

    Args:
        names: the names of the optimizer's parameters.
        params: these parameters.
        model: the model, if it is known.
    """

    def __init__(self, names: Sequence[str], params: Sequence[Tensor], model: nn.Module | None) -> None:
        self.steps = 0
        self.present = [False] * len(names)
        self.nonzero = [False] * len(names)
        self._names = names
        self._params = params
        self._elements = sum(param.numel() for param in params)
        self._in_model = None if model is None else set(model.parameters())
        self._left_out = {} if model is None else parameters_left_out(model, params)
        self._left_out_present = [False] * len(self._left_out)

    def present_now(self) -> list[bool]:
        """Which parameters have a gradient now: those of the optimizer, then those that it lacks."""
        return [param.grad is not None for param in (*self._params, *self._left_out.values())]

    def add(self, present: Sequence[bool], nonzero: Sequence[bool]) -> None:
        """Add a measured step.

        Args:
            present: what `present_now` has returned before it.
            nonzero: for each parameter of the optimizer, whether its gradient was not zero.
        """
        self.steps += 1
        count = len(self._params)
        self.present = _either(self.present, present[:count])
        self._left_out_present = _either(self._left_out_present, present[count:])
        self.nonzero = _either(self.nonzero, nonzero)

    def left_out_of_optimizer(self) -> list[str]:
        """Parameters that have had a gradient, but the optimizer does not have them."""
        return [name for name, present in zip(self._left_out, self._left_out_present, strict=True) if present]

    def zero(self) -> list[str]:
        """Parameters whose gradients were all zero."""
        return self._select(lambda row: self.present[row] and not self.nonzero[row])

    def replaced(self) -> list[str]:
        """Parameters without gradient that the model does not have, or no longer."""
        in_model = self._in_model
        return [] if in_model is None else self._missing(lambda row: self._params[row] not in in_model)

    def cut_off(self) -> list[str]:
        """Parameters without gradient although the same tensor of a later layer has had one.

        What a task does not use are last layers; what `detach()` cuts off are first ones.
        """
        if all(self.present):  # nearly always, and names take time
            return []
        last_layer: dict[str, int] = defaultdict(lambda: -1)  # that has had a gradient, by pattern of names
        for name in self._select(self.present.__getitem__):
            last_layer[name_pattern(name)] = max(last_layer[name_pattern(name)], layer_number(name))
        return self._missing(lambda row: layer_number(self._names[row]) < last_layer[name_pattern(self._names[row])])

    def most_of_all(self) -> list[str]:
        """The parameters without gradient, if they have more than half of all elements."""
        missing = sum(param.numel() for param, present in zip(self._params, self.present, strict=True) if not present)
        return self._missing(lambda _: 2 * missing > self._elements)

    def unused(self) -> list[str]:
        """Parameters that the task does not seem to use: without gradient, and for none of the reasons above."""
        mistakes = {*self.replaced(), *self.cut_off(), *self.most_of_all()}
        return self._missing(lambda row: self._names[row] not in mistakes)

    def _missing(self, condition: Callable[[int], bool]) -> list[str]:
        return self._select(lambda row: not self.present[row] and condition(row))

    def _select(self, condition: Callable[[int], bool]) -> list[str]:
        return [name for row, name in enumerate(self._names) if condition(row)]


def _either(earlier: Sequence[bool], now: Sequence[bool]) -> list[bool]:
    return [a or b for a, b in zip(earlier, now, strict=True)]


def parameters_left_out(model: nn.Module, params: Sequence[Tensor]) -> dict[str, nn.Parameter]:
    """The trainable parameters of a model that are not among an optimizer's `params`, if these are more than half.

    An optimizer with fewer was given them on purpose: another one trains the rest, or nothing does.
    """
    stepped = set(params)
    trainable = {name: param for name, param in model.named_parameters() if param.requires_grad}
    missing = {name: param for name, param in trainable.items() if param not in stepped}
    return missing if 2 * len(missing) < len(trainable) else {}
