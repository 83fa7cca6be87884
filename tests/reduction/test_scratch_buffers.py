"""Scratch buffers are reused, and grow to the largest request."""

import torch

from hf_lowprec.reduction.collectives import ScratchBuffers


def test_memory_is_kept_by_name_and_dtype_and_grows_to_the_largest_size():
    scratch = ScratchBuffers()
    like = torch.empty(0, dtype=torch.bfloat16)
    first = scratch.get("received", 10, like)
    assert (first.shape, first.dtype, scratch.nbytes) == ((10,), torch.bfloat16, 20)
    assert scratch.get("received", 4, like).data_ptr() == first.data_ptr()
    assert scratch.get("received", 10, like).data_ptr() == first.data_ptr()
    assert scratch.nbytes == 20
    assert scratch.get("padded", 3, like).data_ptr() != first.data_ptr()
    assert scratch.get("received", 3, like.float()).dtype == torch.float32
    assert scratch.nbytes == 20 + 6 + 12
    assert scratch.get("received", 11, like).shape == (11,)
    assert scratch.nbytes == 22 + 6 + 12


def test_nothing_is_held_before_it_is_asked_for():
    assert ScratchBuffers().nbytes == 0
