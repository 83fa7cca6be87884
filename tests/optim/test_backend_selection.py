"""Which backend runs: an unknown one, or one that cannot run, is refused by name; `auto` falls back and says so."""

import sys
from types import SimpleNamespace

import pytest
import torch

from hf_lowprec import once
from hf_lowprec.optim import AdamW
from hf_lowprec.optim.backends import selection
from hf_lowprec.optim.backends.eager import EagerStep
from hf_lowprec.optim.backends.triton import availability as triton_availability
from hf_lowprec.optim.backends.triton import launch as triton_launch

GPU = torch.cuda.is_available()


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))]


@pytest.mark.skipif(GPU, reason="there is a GPU for it to run on")
def test_triton_without_a_gpu_says_why_and_what_can(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(RuntimeError, match="runs on a GPU, but there is none") as raised:
        AdamW(params(), backend="triton")
    assert all(word in str(raised.value) for word in ("backend", "triton", "eager", "native", "TRITON_INTERPRET"))


def test_triton_without_triton_says_why_and_what_can(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(RuntimeError, match="needs the package triton") as raised:
        AdamW(params(), backend="triton")
    assert all(word in str(raised.value) for word in ("pip install triton", "eager", "native"))


def test_auto_on_a_gpu_without_a_working_triton_warns_and_is_eager(monkeypatch):
    """As on an image without a C compiler, where Triton cannot build its launcher."""

    def cannot(fused_group):
        raise triton_availability.TritonError("no compiler")

    monkeypatch.setattr(triton_availability, "supports_bfloat16", lambda device: True)
    monkeypatch.setattr(triton_availability, "check_available", lambda device=None: None)
    monkeypatch.setattr(triton_launch, "TritonStep", cannot)
    monkeypatch.setattr(once, "_said", set())
    gpu = torch.device("cuda", 0)
    with pytest.warns(RuntimeWarning, match="'eager' backend on cuda:0, with the same results: no compiler"):
        assert type(selection.build_backend_step("auto", SimpleNamespace(device=gpu))) is EagerStep
    with pytest.raises(triton_availability.TritonError, match="no compiler"):
        selection.build_backend_step("triton", SimpleNamespace(device=gpu))
