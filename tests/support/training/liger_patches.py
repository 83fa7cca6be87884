"""Undo what Liger changes in transformers' Llama."""

from contextlib import contextmanager

from transformers.models.llama import modeling_llama


@contextmanager
def liger_patches_undone():
    """Restore the module and its classes in the end."""
    names = dict(vars(modeling_llama))
    methods = {cls: dict(vars(cls)) for cls in names.values() if isinstance(cls, type) and "Llama" in cls.__name__}
    yield
    vars(modeling_llama).update(names)
    for cls, before in methods.items():
        for name, value in vars(cls).copy().items():
            if name not in before:
                delattr(cls, name)
            elif value is not before[name]:
                setattr(cls, name, before[name])
