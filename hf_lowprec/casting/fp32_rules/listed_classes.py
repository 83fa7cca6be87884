"""Classes whose own code computes in FP32 stay in FP32; `casting/fp32_classes.py` lists them."""

from hf_lowprec.casting.fp32_classes import CLASSES_COMPUTING_IN_FP32
from hf_lowprec.casting.fp32_rules.fp32_parts import Fp32Parts, Reason
from hf_lowprec.casting.module_tree import ModuleTree


def listed_classes(tree: ModuleTree) -> Fp32Parts:
    """Keep the modules of these classes."""
    names = {name: type(module).__name__ for name, module in tree.modules.items()}
    listed = {name: class_name for name, class_name in names.items() if class_name in CLASSES_COMPUTING_IN_FP32}
    return Fp32Parts(
        {n: Reason("listed class", f"{c}: {CLASSES_COMPUTING_IN_FP32[c]}") for n, c in listed.items()},
    )
