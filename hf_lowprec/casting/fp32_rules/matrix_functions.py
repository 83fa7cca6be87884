"""Modules that compute a function of a matrix stay in FP32: torch has none of these in 16 bits.

Most raise an error. The matrix exponential, by which torch's `orthogonal` parametrization computes weights, gives NaN.
"""

import re

from hf_lowprec.casting.fp32_rules.fp32_parts import Fp32Parts, Reason
from hf_lowprec.casting.hooks.forward_code import names_in_forward
from hf_lowprec.casting.module_tree import ModuleTree

_FUNCTIONS = {"matrix_exp", "householder_product", "solve", "inv", "inverse", "slogdet", "cholesky", "qr", "svd"}


def matrix_functions(tree: ModuleTree) -> Fp32Parts:
    """Keep modules without children whose `forward` names such a function, and those whose weight one parametrizes."""
    parts = Fp32Parts()
    for name, module in tree.modules.items():
        functions = _FUNCTIONS & names_in_forward(module)
        if functions and not module._modules:
            owner = re.sub(r"\.?\bparametrizations\.\w+\.\d+$", "", name)
            kept = name if tree.modules[owner]._modules.keys() - {"parametrizations"} else owner
            parts.modules[kept] = Reason("matrix", f"computes {min(functions)}, which torch does not in 16 bits")
    return parts
