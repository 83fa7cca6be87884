"""Start of a program that needs parts of the package and not transformers, which takes five seconds to import."""

from pathlib import Path

STUB = f"""
import sys, types
package = types.ModuleType("hf_lowprec")  # without our __init__.py, which registers names with transformers
package.__path__ = [{str(Path(__file__).resolve().parents[3] / "hf_lowprec")!r}]
sys.modules["hf_lowprec"] = package
"""
