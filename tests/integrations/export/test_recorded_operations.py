"""Operations recorded without values compute what they would have computed with values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_lowprec.integrations.export.recorded_operations import RecordedOperations

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one of a chunk": lambda a, b: torch.chunk(a, 2, dim=0)[1].contiguous(),
    "views": lambda a, b: a.view(2, 2, 3).transpose(0, 1).reshape(4, 3).squeeze(0)[1:],
    "both": lambda a, b: torch.cat([a, b.t()], dim=1).clone(),
    "stack": lambda a, b: torch.stack([a, b.t()]).flatten(),
    "dtype": lambda a, b: a.to(torch.float64) * 2,
    "split": lambda a, b: a.split([1, 3])[1],
    "keyword": lambda a, b: torch.transpose(input=a, dim0=0, dim1=1),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_they_are_repeated_with_values(name):
    values = {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(12.0).view(3, 4) / 7}
    expected = OPERATIONS[name](values["a"], values["b"])
    recorded = RecordedOperations(values)
    with recorded:
        result = OPERATIONS[name](recorded.tensors["a"], recorded.tensors["b"])
    assert result.device.type == "meta" and result.shape == expected.shape and result.dtype == expected.dtype
    assert result.untyped_storage().nbytes() == result.nbytes, "libraries measure tensors by their storage"
    assert recorded.sources_of(result) == ({"a", "b"} if name in ("both", "stack") else {"a"})
    assert torch.equal(*recorded.evaluate([result], values), expected)


def test_other_tensors_are_left_alone():
    recorded = RecordedOperations({"a": torch.ones(2)})
    with recorded:
        other = torch.ones(2) + 1
    assert recorded.sources_of(other) == set() == recorded.sources_of("no tensor")
    assert recorded.evaluate([other], {}) == [other]


@pytest.mark.parametrize("change", [lambda a: a.add_(1), lambda a: a.__setitem__(0, 1), lambda a: torch.neg(a, out=a)])
def test_changes_in_place_are_refused(change):
    """A recording that missed them would write wrong weights."""
    recorded = RecordedOperations({"a": torch.ones(2)})
    with recorded, pytest.raises(NotImplementedError, match="changes a tensor in place while a model is saved"):
        change(recorded.tensors["a"])


def test_what_several_tensors_depend_on_is_computed_once():
    """Not once for each of the experts that are one tensor in the model."""
    values = {"a": torch.arange(12.0)}
    recorded = RecordedOperations(values)
    with recorded:
        parts = recorded.tensors["a"].exp().split(3)
    found = recorded.evaluate(parts, values)
    assert torch.equal(torch.cat(found), values["a"].exp())
    assert len({part.untyped_storage().data_ptr() for part in found}) == 1
