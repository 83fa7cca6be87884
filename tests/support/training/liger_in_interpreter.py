"""Run Liger's norms on a CPU, in Triton's interpreter."""

import triton
import triton.language as tl


class Scalar(float):
    """A number as Triton's compiler passes it to a kernel; its interpreter passes Python's."""

    def to(self, dtype):
        return self


@triton.jit
def rsqrt(x):
    return tl.math.rsqrt(x)


def run_norms(model, monkeypatch):
    """Let the norms of a model that Liger has patched run there; the interpreter lacks CUDA's `rsqrt`."""
    monkeypatch.setattr("liger_kernel.ops.rms_norm.rsqrt", rsqrt)
    for module in model.modules():
        if "casting_mode" in vars(module):
            module.variance_epsilon, module.offset = Scalar(module.variance_epsilon), Scalar(module.offset)
