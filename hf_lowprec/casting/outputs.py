"""FP32 outputs of a cast model: a loss or a metric that is computed from them outside of it is FP32 as well."""

from torch import nn

from hf_lowprec.casting.boundaries import install_upcast_outputs
from hf_lowprec.casting.cast import cast_dtypes
from hf_lowprec.casting.places import compiled_module
from hf_lowprec.casting.predictions import widen_predictions


def return_float32(model: nn.Module, next_to_loss: bool = True) -> None:
    """Let calls of a cast model return 16-bit tensors as exact FP32 copies, as accelerate's mixed precision does.

    Copied are the tensors in tuples, lists and dicts (a `ModelOutput`); caches are not. The loss is FP32 as well: see
    `cast_model` for models with a `loss_function`; those that compute it in `forward` get FP32 predictions for it.

    Trainer (with one of our `optim=` names) and `prepare_accelerator` do so by themselves. A second call changes
    nothing.

    Args:
        model: a model that `cast_model` has cast, or that contains one, or a part of one, which then returns FP32 to
            the rest of the model as well; in place.
        next_to_loss: copy the outputs of a call that returns a loss while gradients are recorded, too: 4 bytes per
            logit. Trainer does not where its own `compute_loss` takes the loss alone.

    Raises:
        ValueError: neither the model nor anything in it was cast.
    """
    dtypes = cast_dtypes(model)
    if not dtypes:
        raise ValueError(f"return_float32: {type(model).__name__} was not cast; call cast_model(model) before")
    for dtype in sorted(dtypes, key=str):
        widen_predictions(model, dtype)
    install_upcast_outputs(compiled_module(model), next_to_loss)
