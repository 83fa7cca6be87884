"""The algorithms, one file each: paper, update formula, states and the scalars computed on the host.

Every optimizer class defined in a file of this folder is registered, unless the file's name begins with an underscore.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from hf_lowprec.optim.optimizer import LowPrecisionOptimizer

_modules = [
    import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
    if not module.name.startswith("_")
]

ALGORITHMS: dict[str, type[LowPrecisionOptimizer]] = {
    cls.__name__: cls
    for module in _modules
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, LowPrecisionOptimizer) and cls.__module__ == module.__name__
}
"""The optimizer classes by name."""
