"""Time that checksums add to saving and resuming a checkpoint, compared with other hashes.

Writes the files that Trainer writes for BF16 weights and a Kahan AdamW: a quarter of the bytes are weights, the rest is
optimizer state. Then it writes the manifest and checks it. Files are read from memory (the page cache), as they are
right after saving.

    python benchmarks/checkpoint_checksums.py [--gigabytes 1] [--rounds 5] [--folder /tmp] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from recorded_run import recorded_run
from safetensors.torch import save_file

from hf_lowprec.integrations.transformers.checkpoints.damage import changed_files
from hf_lowprec.integrations.transformers.checkpoints.manifest import CHUNK_BYTES, ManifestWriter, read_manifest

HASHES = {
    "SHA-256 instead of CRC-32, two threads": lambda chunk: hashlib.sha256(chunk).digest(),
    "BLAKE2b, two threads": lambda chunk: hashlib.blake2b(chunk).digest(),
}
THREADS = 2


def seconds(action: Callable[..., object], *arguments: object) -> torch.Tensor:
    """Time `action`: by the clock, and as processor time of all cores."""
    start = time.perf_counter(), time.process_time()
    action(*arguments)
    return torch.tensor([time.perf_counter() - start[0], time.process_time() - start[1]])


def hash_all(paths: list[Path], function: Callable[[bytes], object]) -> None:
    """Hash every chunk of every file, as `file_checksums.checksums` does it."""

    def of_chunk(place: tuple[Path, int]) -> object:
        with place[0].open("rb", buffering=0) as file:
            file.seek(place[1])
            return function(file.read(CHUNK_BYTES))

    chunks = [(path, start) for path in paths for start in range(0, path.stat().st_size, CHUNK_BYTES)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(of_chunk, chunks))


def table(result: dict[str, Any]) -> str:
    """The CPU times in Markdown."""
    lines = ["| | median, s | minimum, s |", "|---|---:|---:|"]
    for name, taken in result["seconds"].items():
        times = [processor for _, processor in taken]
        lines.append(f"| {name} | {statistics.median(times):.2f} | {min(times):.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="on the storage to measure; the default is the system's temporary folder")
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    options = parser.parse_args()
    parameters = int(options.gigabytes * 1e9 / 8)
    weights = torch.randn(parameters, dtype=torch.bfloat16)
    states = {name: weights.clone() for name in ("exp_avg", "exp_avg_sq", "compensation")}
    times: dict[str, list[torch.Tensor]] = {}

    with recorded_run(options) as result, tempfile.TemporaryDirectory(dir=options.folder) as folder:
        checkpoint = Path(folder, "checkpoint-1")
        files = [checkpoint / "model.safetensors", checkpoint / "optimizer.pt"]

        def save() -> None:
            save_file({"weight": weights}, files[0])
            torch.save({"state": {0: states}}, files[1])

        for _ in range(options.rounds):
            writer = ManifestWriter()
            begun = seconds(writer.begin, checkpoint, 1, None, [])
            times.setdefault("writing the files", []).append(seconds(save))
            times.setdefault("writing the manifest", []).append(begun + seconds(writer.complete, checkpoint, {}))
            written = read_manifest(checkpoint)
            assert written is not None and changed_files(checkpoint, written) == []
            check = seconds(changed_files, checkpoint, written)
            times.setdefault("verifying it when resuming", []).append(check)
            for name, function in HASHES.items():
                times.setdefault(name, []).append(seconds(hash_all, files, function))

        result["seconds"] = {name: torch.stack(taken).tolist() for name, taken in times.items()}
    print(table(result))


if __name__ == "__main__":
    main()
