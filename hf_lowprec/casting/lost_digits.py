"""Warnings about lost digits: of numbers, which the cast rounds, and of weights, which were rounded when loaded.

Weights are tensors that the cast keeps in FP32, and trainable parameters whose checkpoint is FP32: with Kahan
summation, an optimizer uses the digits that the cast rounds off. `save_pretrained` writes each tensor in its own dtype,
but `from_pretrained` gives all of them the config's dtype, which is that of the first parameter: FP32 norms of a saved
BF16 model come back in BF16.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_lowprec.casting.argument_roles import names_numbers, words_of
from hf_lowprec.casting.cast_plan import CastPlan, TensorPlan
from hf_lowprec.casting.earlier_casts import was_cast
from hf_lowprec.casting.module_kinds import is_rotary
from hf_lowprec.casting.module_tree import shape_of
from hf_lowprec.casting.quantized import holds_quantized_weights
from hf_lowprec.rounding import LOW_PRECISION_DTYPES, dtype_name

_PARTS_OF_LAYERS = ("weight", "weights", "bias", "original0", "original1")  # the last two are torch's parametrizations

_EMBEDDINGS = {"emb", "embed", "embeds", "embedding", "embeddings", "enc", "encoding", "encodings"}  # of positions


def rounded_number_warnings(plan: CastPlan) -> Iterator[str]:
    """Yield one line about numbers that lose digits in a cast, and one about those that may, if there are any.

    Numbers are buffers of at most one dimension (class weights, frequencies) or with a name for numbers
    (`alphas_cumprod`), and parameters of one element (`logit_scale`). On the meta device they have no values yet: they
    are rounded when the model is initialized, after the cast.

    Args:
        plan: the plan of a cast that was not carried out yet.
    """
    numbers = {t.name: t.target.tensor for t in plan.tensors if t.action == "cast" and _holds_numbers(t)}
    narrowed = {name: t for name, t in numbers.items() if t.dtype.itemsize > plan.dtype.itemsize}
    lost = [name for name, tensor in narrowed.items() if not tensor.is_meta and _loses_digits(tensor, plan.dtype)]
    if lost:
        yield f"{len(lost)} tensors lose digits in {dtype_name(plan.dtype)}: {_names_and_remedy(lost)}"
    unknown = [name for name, tensor in narrowed.items() if tensor.is_meta]
    if unknown:
        yield (
            f"{len(unknown)} tensors on the meta device will be rounded to {dtype_name(plan.dtype)} when they are "
            f"initialized: {_names_and_remedy(unknown)}"
        )


def _names_and_remedy(names: list[str]) -> str:
    """Return the names, with one entry for the same tensor of all layers, and the `keep_fp32` that keeps them."""
    entries = list(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name) for name in names))
    return (
        f"{', '.join(entries)}. "
        f'`cast_model(model, keep_fp32={entries})`, or `optim_args="keep_fp32={"|".join(entries)}"`, keeps them in FP32'
    )


def _holds_numbers(planned: TensorPlan) -> bool:
    tensor, owner, last = planned.target.tensor, planned.target.owner, planned.name.rpartition(".")[2]
    if isinstance(tensor, nn.Parameter):
        return shape_of(tensor).numel() == 1 and last not in _PARTS_OF_LAYERS  # such as the bias of a regression
    if type(owner).__module__.startswith("transformers."):  # these classes convert buffers where they need to
        return False
    if not _EMBEDDINGS.isdisjoint(words_of(last)):
        return False  # sines of positions, and Gemma's `embed_scale`, which its code rounds itself
    return tensor.dim() < 2 or (names_numbers(last) and last not in _PARTS_OF_LAYERS)


def _loses_digits(tensor: Tensor, dtype: torch.dtype) -> bool:
    values = getattr(tensor, "ds_tensor", tensor).detach()
    return not bool(torch.equal(values.to(dtype).to(values.dtype), values))


_STORED_16_BIT, _STORED_FP32 = ("BF16", "F16"), ("F32",)  # as safetensors spells them
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


def rounded_weight_warnings(
    model: nn.Module, plan: CastPlan, loaded_dtypes: Mapping[str, torch.dtype]
) -> Iterator[str]:
    """Yield one line about tensors that lost digits when they were loaded, if there are any.

    Tensors that are 16-bit in the checkpoint lost nothing when they were loaded. If the checkpoint is not on this
    machine, tensors of zeros and ones count as initial values, which fit 16 bits, and there is no line about trainable
    parameters. Parameters that an earlier cast had in FP32 are left out, as are rotary tables, which are recomputed,
    and quantized models: their norms are loaded in 16 bits, as the guide says, and lose less than quantized weights.

    Args:
        model: the model; its transformers modules say which checkpoint they were loaded from.
        plan: the plan of a cast that was carried out.
        loaded_dtypes: the dtypes of the tensors before it, by name.
    """
    narrow = [t for t in plan.tensors if loaded_dtypes[t.name] in LOW_PRECISION_DTYPES]
    kept = [t for t in narrow if t.action == "keep" and not is_rotary(t.target.owner)]
    trained = [t for t in narrow if t.action == "cast" and t.target.is_trainable and not was_cast(t.target.owner)]
    if not (kept or trained) or any(map(holds_quantized_weights, model.modules())):
        return
    stored = dict(_stored_dtypes(model))
    stored = {name.partition(".")[2]: dtype for name, dtype in stored.items()} | stored  # loaded into a base model
    rounded = []
    for weight in kept:
        dtype = _stored_dtype_of(weight.name, stored)
        if dtype not in _STORED_16_BIT and (dtype is not None or not _is_initial(weight.target.tensor)):
            rounded.append(weight.name)
    with_low_bits = [weight.name for weight in trained if _stored_dtype_of(weight.name, stored) in _STORED_FP32]
    gain = f"split weights and Kahan summation start from the FP32 values of {len(with_low_bits)} trainable tensors"
    if rounded:
        text = (
            f"{len(rounded)} tensors that are kept in FP32 ({rounded[0]}, …) were loaded in "
            f"{dtype_name(loaded_dtypes[rounded[0]])}. If their checkpoint has them in FP32, as hf_lowprec's "
            "checkpoints do, load it with from_pretrained(…, dtype=torch.float32); hf_lowprec casts the rest"
        )
        yield f"{text}, and {gain}" if with_low_bits else text
    elif with_low_bits:
        yield (
            f"{len(with_low_bits)} trainable tensors ({with_low_bits[0]}, …) were loaded in "
            f"{dtype_name(loaded_dtypes[with_low_bits[0]])}, but their checkpoint has them in FP32. With "
            f"from_pretrained(…, dtype=torch.float32), {gain}"
        )


def _is_initial(tensor: Tensor) -> bool:
    """Return whether a tensor, or this rank's shard, has only values that norms start from."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.is_meta or bool(((local == 0) | (local == 1)).all())


def _stored_dtype_of(name: str, stored: Mapping[str, str]) -> str | None:
    """Return the dtype stored under `name` or, because wrappers add prefixes, under its longest stored ending."""
    parts = name.split(".")
    endings = (".".join(parts[k:]) for k in range(max(len(parts) - 1, 1)))
    return next((stored[ending] for ending in endings if ending in stored), None)


def _stored_dtypes(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield name and dtype of each tensor in the model's safetensors checkpoint, if that is on this machine."""
    names = (vars(module).get("name_or_path") for module in model.modules())
    name = next((name for name in names if isinstance(name, str) and name), None)
    folder = None if name is None else _folder(name)
    for file in sorted(folder.glob("model*.safetensors")) if folder is not None else ():
        try:
            with file.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(size)) if size <= _LONGEST_HEADER else {}
            yield from ((key, value["dtype"]) for key, value in header.items() if key != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not a readable checkpoint: skip it
            continue


def _folder(name_or_path: str) -> Path | None:
    """Return the folder of a checkpoint; for a name on the Hub, its folder in the cache. The network is not used."""
    try:
        if Path(name_or_path).is_dir():
            return Path(name_or_path)
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name_or_path, "config.json")
    except (ImportError, OSError, ValueError):  # ValueError: not a valid name on the Hub
        return None
    return Path(cached).parent if isinstance(cached, str) else None
