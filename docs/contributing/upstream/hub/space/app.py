"""Show the losses of the twin models, run by run. It needs trackio, and nothing from a network.

    python app.py [RECORD]

RECORD is `benchmarks/results/evidence/pretrained-night.json` of the repository; on the Hub, it lies next to this file.
"""

import json
import sys
from pathlib import Path

try:
    import trackio
except ImportError:
    sys.exit("This dashboard needs trackio: pip install trackio")

PROJECT, RATE = "smollm2-135m", "2e-05"
RUNS = {"fp32": "fp32", "split": "adamw_bf16_split"}


def log_runs(path):
    """Log the losses before and after each run."""
    if not path.exists():
        sys.exit(f"{path} is missing: copy benchmarks/results/evidence/pretrained-night.json there")
    record = json.loads(path.read_text(encoding="utf-8"))
    cases, settings = record["cases"], record["settings"]
    for way, name in RUNS.items():
        for seed in range(settings["seeds"]):
            trackio.init(PROJECT, f"{name}, seed {seed}", group=name, auto_log_gpu=False, auto_log_cpu=False)
            trackio.log({"loss": cases[f"fp32 {RATE} {seed}"]["before"]}, step=0)
            trackio.log({"loss": cases[f"{way} {RATE} {seed}"]["loss"]}, step=settings["steps"])
            trackio.finish()


if __name__ == "__main__":
    log_runs(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_name("pretrained-night.json"))
    trackio.show(PROJECT, host="0.0.0.0", open_browser=False)
