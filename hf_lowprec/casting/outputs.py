"""FP32 outputs of a cast model: a loss or a metric that is computed from them outside of it is FP32 as well."""

from torch import nn

from hf_lowprec.casting.boundaries import install_upcast_outputs
from hf_lowprec.casting.cast import cast_dtypes
from hf_lowprec.casting.places import compiled_module
from hf_lowprec.casting.predictions import widen_predictions


def return_float32(model: nn.Module, next_to_loss: bool = True) -> None:
    """Let a cast model return FP32 to the code that calls it, as accelerate's mixed precision does.

    16-bit tensors among the outputs, in tuples, lists and dicts (a `ModelOutput`), are replaced by exact FP32 copies;
    caches are not. The loss is FP32 as well, also in models that compute it in `forward`.

    Trainer (with one of our `optim=` names) and `prepare_accelerator` call this by themselves. A second call changes
    nothing.

    Args:
        model: a model that `cast_model` has cast, or that contains one; in place. A part of a model returns FP32 to the
            rest of the model as well.
        next_to_loss: copy outputs also in a call that returns a loss while gradients are recorded, for 4 bytes per
            logit. Trainer does not where its own `compute_loss` uses the loss alone.

    Raises:
        ValueError: neither the model nor anything in it was cast.
    """
    dtypes = cast_dtypes(model)
    if not dtypes:
        raise ValueError(f"return_float32: {type(model).__name__} was not cast; call cast_model(model) before")
    for dtype in sorted(dtypes, key=str):
        widen_predictions(model, dtype)
    install_upcast_outputs(compiled_module(model), next_to_loss)
