"""Modules that compute a function of a matrix stay in FP32: torch has none of these in 16 bits.

Most raise an error. The matrix exponential, by which torch's `orthogonal` parametrization computes weights, gives NaN.
"""

from torch.nn.utils.parametrize import ParametrizationList

from hf_lowprec.casting.fp32_rules.fp32_parts import Fp32Parts, Reason
from hf_lowprec.casting.hooks.forward_code import names_in_forward
from hf_lowprec.casting.module_tree import ModuleTree

_FUNCTIONS = {"matrix_exp", "householder_product", "solve", "solve_triangular", "inv", "inverse", "pinv", "cholesky"}
_FUNCTIONS |= {"qr", "svd", "eigh", "det", "slogdet", "logdet"}


def matrix_functions(tree: ModuleTree) -> Fp32Parts:
    """Keep modules without children whose `forward` names such a function, and those that one parametrizes."""
    parts = Fp32Parts()
    for name, module in tree.modules.items():
        if not (functions := _FUNCTIONS & names_in_forward(module)):
            continue
        parametrized = name.rpartition(".")[0]
        if isinstance(tree.modules[parametrized], ParametrizationList):
            owner = parametrized.rpartition("parametrizations.")[0].removesuffix(".")
            name = parametrized if len(tree.modules[owner]._modules) > 1 else owner
        elif module._modules:
            continue
        parts.modules[name] = Reason("matrix", f"computes {min(functions)}, which torch does not in 16 bits")
    return parts
