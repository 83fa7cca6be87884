"""Run code as in an interpreter that has imported torch, but neither this package nor transformers or accelerate."""

import sys

ANEW = ("hf_lowprec", "transformers", "accelerate")


def is_of(name: str | None) -> bool:
    return (name or "").partition(".")[0] in ANEW


for name in filter(is_of, [*sys.modules]):
    del sys.modules[name]
sys.meta_path[:] = [finder for finder in sys.meta_path if not is_of(getattr(finder, "__module__", None))]
code, *sys.argv[1:] = sys.argv[1:]
exec(code, {"__name__": "__main__"})
