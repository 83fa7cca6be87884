"""`cast_model` plans a cast, carries it out and reports it."""

from collections.abc import Callable

import torch
from torch import nn

from hf_lowprec.casting.apply_plan import apply_plan
from hf_lowprec.casting.cast_plan import make_plan
from hf_lowprec.casting.cast_report import CastReport
from hf_lowprec.casting.earlier_casts import check_model_and_dtype, set_marks
from hf_lowprec.casting.fp32_rules import KeepFp32, as_entries


def cast_model(
    model: nn.Module, dtype: torch.dtype | str = torch.bfloat16, keep_fp32: KeepFp32 = (), keep_low_bits: bool = True
) -> CastReport:
    """Cast a model to BF16 or FP16 in place, keep norms and other sensitive parts in FP32, and report what was done.

    **Cast to 16 bits**: all floating-point parameters and buffers that no rule keeps in FP32, and the gradients of
    these parameters. `Parameter` objects and tied weights are preserved. Quantized weights and their scales are not
    changed. Casting a model again changes nothing, unless modules were added to it.

    **Kept in FP32**, with every module that shares a tied weight with one of them:

    - norms, by class or by name;
    - rotary embeddings, Fourier features, and other modules with a buffer named `inv_freq`;
    - loss modules, by name, if they have no parameters or only scalar ones (a temperature);
    - biases that choose experts, such as `e_score_correction_bias`, as single tensors;
    - layers that compute a function of a matrix which torch lacks in 16 bits, such as orthogonal parametrizations;
    - the modules listed in the model's `_keep_in_fp32_modules` and `_keep_in_fp32_modules_strict`;
    - a few transformers classes whose code computes in FP32;
    - modules whose quantized weights act as FP32 tensors;
    - everything that `keep_fp32` matches.

    **Hooks** let modules of both dtypes work together:

    - A module kept in FP32 gets its inputs in FP32 and returns `dtype` to the next module. Losses and output heads
      return FP32; a head is what `get_output_embeddings()` returns, or the model's last layer if `keep_fp32` names it.
    - A model that holds 16-bit tensors, and each model inside it, rounds the activations among its arguments to
      `dtype`. Labels, targets, positions, timesteps, weights, counts and all tensors with fewer than two dimensions are
      not rounded; timesteps and guidance scales are not even where the `forward` of a model outside transformers
      converts them. Values that a module computes from such FP32 numbers are FP32, so on the first call that passes
      some, its children get hooks that round their inputs. Make one such call before `torch.compile(fullgraph=True)`,
      and before any `torch.compile` if a model outside transformers takes integer timesteps.
    - The `loss_function` of transformers models computes in FP32, and so do the distributions that they predict, and
      torch's loss functions while the `forward` of your own model runs, or that of a module that names one of them.
      This takes about a microsecond per torch call, and does not reach into activation checkpoints.

    What `forward` writes into an argument that a hook converts, or into a list or dict with such entries, reaches the
    caller's own when the call ends. It does not in code that torch has compiled; nor do writes into tensors in
    `torch.inference_mode()`.

    Hooks run only when a module itself is called, not one of its other methods. If a module multiplies FP32 numbers by
    its own 16-bit parameters (`points @ self.weight`), pass those numbers in 16 bits.

    Args:
        model: any module on any device, meta included, before DDP or FSDP wraps it. Tensor parallelism may have made
            DTensors of its parameters, and transformers may have sharded it while loading it (`DistributedConfig`).
        dtype: `torch.bfloat16` or `torch.float16`, or its name as a string.
        keep_fp32: one or more entries, each a string or a module class. A string is a case-sensitive glob (`fnmatch`;
            `*` also matches dots) that must match the whole name of a module, parameter or buffer, or everything after
            one of the dots in it: `"lm_head"`, `"layers.0.*"`, `"*.mlp.down_proj"`. A module is kept with all its
            submodules. A tensor is kept with the module that owns it if that has no children; otherwise only the tensor
            is kept, without hooks. A class keeps its instances.
        keep_low_bits: keep what the cast rounds off trainable FP32 parameters, and FP16 ones that become BF16, at 2
            bytes per parameter until the first step. An hf_lowprec optimizer with Kahan summation or split weights uses
            it as the first compensation or remainder; one in another rounding mode drops it. All ranks must have the
            same weights. Set it to False if no such optimizer follows and memory is short.

    Returns:
        A report of the dtypes, the parts kept in FP32 with reasons, and the hooks; `print` it.

    Raises:
        ValueError: `dtype` is unsupported or differs from that of an earlier cast; an entry of `keep_fp32` matches
            nothing, covers quantized weights, or names a tensor that an earlier cast has rounded; the model is already
            wrapped or prepared for training, or runs under autocast, or it has run since transformers sharded it.
        TypeError: an entry of `keep_fp32` is neither a string nor a module class.
    """
    dtype = check_model_and_dtype(model, dtype)
    entries = as_entries(keep_fp32)
    report = apply_plan(model, make_plan(model, dtype, entries), keep_low_bits)
    set_marks(model, dtype, entries)
    return report


@torch.no_grad()
def cast_like_trained(
    model: nn.Module, trained: nn.Module | None, cast: Callable[[nn.Module], CastReport]
) -> CastReport:
    """Cast a model that is evaluated alongside the trained one, such as a reference, a teacher or a judge.

    Without a cast, it would compute in the dtype in which it was loaded, and a reference that is a copy of the trained
    model would give different log-probabilities. Tensors are restored that loading has rounded but the trained model
    has in full precision.

    TRL loads a reference in the trained model's dtype, so norms, which are FP32 in the trained model, arrive in 16 bits
    in the reference. A tensor of `model` that the cast has upcast takes the value of the tensor with the same name in
    `trained` if the two differ only by rounding.

    Args:
        model: the model to cast, not sharded yet.
        trained: the model being trained, already cast; None if there is none.
        cast: a function that casts a model in place.

    Returns:
        The report of `cast`.
    """
    report = cast(model)
    tensors, exact_tensors = model.state_dict(), {} if trained is None else trained.state_dict()
    for name, loaded_dtype in report.upcast.items():
        exact, rounded = exact_tensors.get(name), tensors.get(name)
        if exact is None or rounded is None or exact.shape != rounded.shape:
            continue
        exact = exact.to(rounded.device, torch.float32)
        if torch.equal(exact.to(loaded_dtype).float(), rounded):
            rounded.copy_(exact)
    return report
