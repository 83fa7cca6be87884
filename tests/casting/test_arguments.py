"""No floating argument of any `forward` of transformers is rounded, other than activations and masks: by name."""

import inspect
import re
import sys
import warnings

import pytest
import transformers
from transformers.utils import TransformersKwargs

from hf_lowprec.casting.argument_roles import role_of
from tests.support.every_architecture.forward_arguments import ACTIVATIONS, MASKS, NOT_FLOATING, NUMBERS, REFERENCES
from tests.support.every_architecture.model_classes import classes_by_type

# Of a tensor that may be floating, of a result that holds one, of a number, of anything.
FLOATING = re.compile(r"(?<![A-Za-z])Tensor|FloatTensor|Output\b|\bfloat\b|\bAny\b")


def floating_arguments() -> dict[str, set[str]]:
    """Argument -> classes that have it, of the support table's and every model inside, whose calls round too."""
    names = {name for classes in classes_by_type().values() for name in classes}
    listed = {model for name in names if isinstance(model := getattr(transformers, name, None), type)}
    classes = set(listed)
    for module in {sys.modules[model.__module__] for model in listed if model.__module__ in sys.modules}:
        inside = [part for part in vars(module).values() if isinstance(part, type)]
        classes |= {part for part in inside if issubclass(part, transformers.PreTrainedModel)}
    found: dict[str, set[str]] = {}
    for name, kind in TransformersKwargs.__annotations__.items():  # what any forward takes
        if FLOATING.search(str(kind)):
            found[name] = {"TransformersKwargs"}
    for model in classes:
        try:
            parameters = list(inspect.signature(model.forward).parameters.values())[1:]
        except ImportError:  # an optional package is missing
            continue
        for p in parameters:
            plain = p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            if plain and (p.annotation is p.empty or FLOATING.search(str(p.annotation))):
                found.setdefault(p.name, set()).add(model.__name__)
    return found


@pytest.fixture(scope="module")
def arguments() -> dict[str, set[str]]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(50)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = floating_arguments()
    transformers.logging.set_verbosity(level)
    return found


LISTED = {
    "activation": " ".join(ACTIVATIONS.values()).split(),
    "mask": MASKS.split(),
    "number": " ".join(NUMBERS.values()).split(),
    "reference": REFERENCES.split(),
    "": " ".join(NOT_FLOATING.values()).split(),
}


def test_no_argument_is_listed_twice() -> None:
    names = [name for listed in LISTED.values() for name in listed]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})


@pytest.mark.every_case  # only another release of transformers can change it
@pytest.mark.slow
def test_every_argument_is_listed(arguments: dict[str, set[str]]) -> None:
    names = {name for listed in LISTED.values() for name in listed}
    new = {name: sorted(classes)[:3] for name, classes in arguments.items() if name not in names}
    assert not new, f"say in forward_arguments.py what these arguments of transformers are: {new}"


@pytest.mark.parametrize("role", ["activation", "mask", "number", "reference"])
def test_only_activations_and_masks_are_rounded(role: str) -> None:
    """Check what the hook takes each argument for, by its name and number of dimensions."""
    rounds = {"activation", "mask"}
    wrong = {name: found for name in LISTED[role] if (found := role_of(name, 3)) != role}
    assert not wrong, f"not {role}, as forward_arguments.py says: {wrong}"
    for dims in (0, 1):
        assert not [name for name in LISTED[role] if role_of(name, dims) in rounds]
