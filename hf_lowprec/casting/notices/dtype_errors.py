"""Advice on torch's errors about mixed dtypes in a cast model: which module failed, and what to change.

That is what to keep in FP32, or, if the model was converted or sharded the wrong way after its cast, that line.
"""

import fnmatch
import linecache
import re
import sys
import traceback
from collections.abc import Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from hf_lowprec.casting.earlier_casts import cast_dtypes
from hf_lowprec.casting.hooks.input_downcast import numbers_of
from hf_lowprec.casting.hooks.module_hooks import remove_hooks, upcasts_inputs
from hf_lowprec.casting.module_tree import join
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, dtype_name

# Phrases of the messages of torch 2.9 to 2.13 about products, convolutions, attention, norms, recurrent layers, losses
# and indexed writes.
_MISMATCH = re.compile(
    r"same (scalar |d)?types?\b|type .* should be the same|must have the type\b|[Ee]xpected (scalar type|dtype)\b"
    r"|Found dtype\b|dtypes? .*\bmatch|dtypes must be the same|mixed dtype|to be equal to src\.dtype"
    r"|Type promoting not supported|not implemented for '(BFloat16|Half)'"
    r"|(Unsupported dtype|dtypes not supported\. Got) (BFloat16|Half)"
)
# The same phrases about integers and complex numbers are errors of another kind.
_INTEGERS = re.compile(r"\b(Long|Int|Short|Char|Byte|Bool|int|bool|u?int\d+)\b|c10::complex|Complex")
_SHARDED_TOGETHER = "FSDP expects uniform original parameter dtype"
_TO_FLOAT32 = {"float", "float32", "double", "float64"}  # names in code that converts to FP32


def install_advice(module: nn.Module) -> bool:
    """Let errors about mixed dtypes in calls of `module` say which module below failed. Return whether this is new."""
    is_new = explain_dtype_error not in module._forward_hooks.values()
    for part in module.modules():
        remove_advice(part)  # of an earlier cast of a part, which knows only the end of a name
    module.register_forward_hook(explain_dtype_error, always_call=True)
    return is_new


def remove_advice(module: nn.Module) -> None:
    """Take `install_advice` back."""
    remove_hooks(module, lambda hook: hook is explain_dtype_error)


def explain_dtype_error(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook that torch calls after an error as well: add the advice to the error's text."""
    if output is not None or torch.compiler.is_compiling():
        return
    error = sys.exc_info()[1]
    if (
        not isinstance(error, RuntimeError | ValueError | AssertionError)
        or not error.args
        or not isinstance(error.args[0], str)
    ):
        return
    text = error.args[0]
    # The outermost frame is the call of this module; it is not in code that calls the model to handle another error.
    trace = error.__traceback__
    if trace is None or trace.tb_frame.f_locals.get("self") is not module:
        return
    if text.startswith(_SHARDED_TOGETHER):
        error.args = (f"{text}\n{_ADVICE_FOR_FSDP2}", *error.args[1:])
    elif _MISMATCH.search(text) and not _INTEGERS.search(text):
        error.args = (f"{text}\n{_conversion_advice(module) or _advice(module, trace)}", *error.args[1:])


_ADVICE_FOR_FSDP2 = (
    "hf_lowprec: a cast model has norms in FP32, which FSDP2 must shard separately. Call "
    "`prepare_accelerator(accelerator)` before `accelerator.prepare` or, without Accelerate, "
    "`hf_lowprec.reduction.shard_fp32_parameters(model)` before the first `fully_shard`."
)


def _conversion_advice(model: nn.Module) -> str | None:
    """Name the line to remove if the whole model, with what was kept in FP32, was converted after its cast."""
    dtypes = {param.dtype for param in model.parameters() if param.is_floating_point()}
    cast_to = cast_dtypes(model)
    kept = {p.dtype for module in model.modules() if upcasts_inputs(module) for p in module.parameters()}
    if not dtypes or (dtypes & cast_to and not kept & cast_to):
        return None
    now, before = min(map(dtype_name, dtypes)), min(map(dtype_name, cast_to))
    return (
        f"hf_lowprec: the model was converted to {now} after cast_model had converted it to {before} with FP32 norms. "
        "Remove that line (`model.half()`, `model.float()`, `model.to(…)`, Lightning's `precision`). For another dtype "
        "after training, load the folder that `hf_lowprec.save_pretrained` writes. If you use FSDP2 with mixed "
        "precision, accelerate converted the model: call `prepare_accelerator(accelerator)` before "
        "`accelerator.prepare`."
    )


def _advice(model: nn.Module, trace: TracebackType) -> str:
    """Say which module failed, which one converts to FP32, and which entry of `keep_fp32` avoids the error."""
    names = {id(module): name for name, module in model.named_modules()}
    calls = [(module, code) for module, code in _calls(trace) if id(module) in names]
    failed = calls[-1][0]
    text = f"hf_lowprec: this failed in {_description(failed, names)}"
    converting = [
        module
        for module, code in calls
        if not _TO_FLOAT32.isdisjoint(code.co_names) and not type(module).__module__.startswith("torch.")
    ]
    if converting and converting[-1] is not failed:
        text += f", called by {_description(converting[-1], names)}, whose code converts to FP32"
    keep = next((names[id(module)] for module in (*reversed(converting), failed) if module is not model), "")
    if keep:
        keep = _pattern(keep, dict(model.named_modules()))
        text += f". Keep it in FP32: `cast_model(model, keep_fp32='{keep}')`, or `optim_args=\"keep_fp32={keep}\"`."
    else:
        text += ". Convert in its code (`a.to(b.dtype)`)"
        if tensors := _tensors_in_failed_line(trace, failed, names[id(failed)]):
            entries = repr(tensors[0] if len(tensors) == 1 else tensors)
            text += f", or keep the tensors that it uses there in FP32: `cast_model(model, keep_fp32={entries})`, "
            text += f'or `optim_args="keep_fp32={"|".join(tensors)}"`'
        text += "."
    numbers = next(filter(None, (numbers_of(module) for module, _ in reversed(calls))), ())
    if numbers:
        arguments = ", ".join(f"`{name}`" if name else "an argument" for name in numbers)
        text += f" FP32 numbers were passed as {arguments} and not rounded. Pass activations in 16 bits."
    return text


def _tensors_in_failed_line(trace: TracebackType, module: nn.Module, name: str) -> list[str]:
    """The qualified names of the 16-bit parameters and buffers that the line names on which a module's code failed."""
    frames = zip(_frames(trace), traceback.extract_tb(trace), strict=True)
    *_, (frame, summary) = ((frame, summary) for frame, summary in frames if _called_module(frame) is module)
    name_of_self = frame.f_code.co_varnames[0]
    attributes = re.findall(rf"\b{name_of_self}\.([\w.]+)", _source_of_operation(summary))
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    attributes = [a for a in dict.fromkeys(attributes) if a in tensors and tensors[a].dtype in LOW_PRECISION_DTYPES]
    return [join(name, attribute) for attribute in attributes]


def _source_of_operation(summary: traceback.FrameSummary) -> str:
    """The source of the operation that a frame was at: only its columns if it is on one line, from Python 3.11 on."""
    first = summary.lineno or 0
    last = getattr(summary, "end_lineno", None) or first
    start, end = getattr(summary, "colno", None), getattr(summary, "end_colno", None)
    lines = [linecache.getline(summary.filename, number) for number in range(first, last + 1)]
    if len(lines) == 1 and start is not None:
        return lines[0].encode()[start:end].decode(errors="replace")  # columns count bytes of UTF-8
    return "".join(lines)


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _called_module(frame: FrameType) -> nn.Module | None:
    """The module whose method a frame runs: the first argument, whatever its name is."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return first if isinstance(first, nn.Module) else None


def _calls(trace: TracebackType | None) -> Iterator[tuple[nn.Module, CodeType]]:
    """Yield the methods of modules that were running, outermost first: the module, and the method's code."""
    for frame in _frames(trace):
        module = _called_module(frame)
        if module is not None:
            yield module, frame.f_code


def _description(module: nn.Module, names: dict[int, str]) -> str:
    """The name and class of a module, for a message."""
    name = names[id(module)]
    return f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


def _pattern(name: str, modules: dict[str, nn.Module]) -> str:
    """A glob that matches `name` in every layer (`layers.*.attention`), or `name` if those are of different classes."""
    pattern = re.sub(r"(?<![^.])\d+(?=\.)", "*", name)
    classes = {type(module) for path, module in modules.items() if fnmatch.fnmatchcase(path, pattern)}
    return pattern if len(classes) == 1 else name
