"""Optimizer step and training on this machine's GPU: ours in each mode, compared with torch's and other packages'.

One command, at most nine minutes, nothing is downloaded; packages that are not installed are left out. No speed is
reported for a kernel whose results differ from those of the CPU reference in any bit. Results are written after every
part:

    python benchmarks/gpu_step.py [--seconds 540] [--output FOLDER]
    python benchmarks/gpu_step.py --training        # training in every setting: also compiled, and with Liger's kernels
    python benchmarks/gpu_step.py --rehearse        # everything but the GPU, on small shapes, into a temporary folder

Without an installation of hf_lowprec any Python that has torch, triton, transformers and accelerate will do. In a copy
of the checkout without git, set COMMIT to what it is a copy of. Exit status: 1 if something of ours failed or did not
end in time, 2 without a GPU or one of these packages.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import sys
import tempfile
from datetime import date
from pathlib import Path

from gpu.budget import Budget

NEEDED = ("torch", "transformers", "accelerate")
"""And triton, if not for a rehearsal."""
RESULTS = Path(__file__).resolve().parent / "results"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=540, help="time limit (default: 540)")
    parser.add_argument("--output", type=Path, help=f"folder of the results (default: {RESULTS})")
    parser.add_argument("--training", action="store_true", help="only parity, and training in every setting")
    parser.add_argument("--rehearse", action="store_true", help="run everything once on the CPU, on small shapes")
    options = parser.parse_args(arguments)
    budget = Budget(options.seconds)
    budget.stop_at_the_end(grace=10)

    needed = NEEDED if options.rehearse else (*NEEDED, "triton")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        print(f"bench-gpu: not installed: {', '.join(missing)}; pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    # Only now: importing these takes a good part of a minute on a machine that has not done it before.
    import torch
    from gpu.benchmark import Benchmark, run
    from gpu.device import Device, Gpu, Rehearsal
    from gpu.report import Report

    gc.freeze()  # memory is released before every measurement, and what was imported need not be looked through
    if not options.rehearse and not torch.cuda.is_available():
        print("bench-gpu: torch sees no GPU here; --rehearse runs everything else", file=sys.stderr)
        return 2
    device: Device = Rehearsal() if options.rehearse else Gpu()
    default = Path(tempfile.mkdtemp(prefix="gpu_step-rehearsal-")) if options.rehearse else RESULTS
    report = Report(options.output or default, device.name, str(date.today()))
    run(Benchmark(device, budget, report), options.training)
    print(f"\n{report.markdown.read_text(encoding='utf-8')}\nwritten to {report.json} and {report.markdown.name}")
    return 1 if report.result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
