"""Time that checksums add to saving and resuming a checkpoint, compared with other hashes.

Writes the files that Trainer writes for BF16 weights and a Kahan AdamW: a quarter of the bytes are weights, the rest is
optimizer state. Then it writes the manifest and checks it. Files are read from memory (the page cache), as they are
right after saving.

    python benchmarks/checkpoint_checksums.py [--gigabytes 1] [--rounds 5] [--folder /tmp]
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from hf_lowprec.integrations.transformers.checkpoints.checksums import CHUNK_BYTES
from hf_lowprec.integrations.transformers.checkpoints.damage import changed_files
from hf_lowprec.integrations.transformers.checkpoints.manifest import ManifestWriter, read_manifest

HASHES = {
    "crc32": zlib.crc32,
    "sha256": lambda chunk: hashlib.sha256(chunk).digest(),
    "blake2b": lambda chunk: hashlib.blake2b(chunk).digest(),
}


def seconds(action: Callable[..., object], *arguments: object) -> torch.Tensor:
    """Time `action`: by the clock, and as processor time of all cores."""
    start = time.perf_counter(), time.process_time()
    action(*arguments)
    return torch.tensor([time.perf_counter() - start[0], time.process_time() - start[1]])


def hash_all(paths: list[Path], function: Callable[[bytes], object], threads: int) -> None:
    """Hash every chunk of every file, as `file_checksums.checksums` does it."""

    def of_chunk(place: tuple[Path, int]) -> object:
        with place[0].open("rb", buffering=0) as file:
            file.seek(place[1])
            return function(file.read(CHUNK_BYTES))

    chunks = [(path, start) for path in paths for start in range(0, path.stat().st_size, CHUNK_BYTES)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(of_chunk, chunks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="on the storage to measure; the default is the system's temporary folder")
    options = parser.parse_args()
    parameters = int(options.gigabytes * 1e9 / 8)
    weights = torch.randn(parameters, dtype=torch.bfloat16)
    states = {name: weights.clone() for name in ("exp_avg", "exp_avg_sq", "compensation")}
    times: dict[str, list[torch.Tensor]] = {}

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        checkpoint = Path(folder, "checkpoint-1")
        files = [checkpoint / "model.safetensors", checkpoint / "optimizer.pt"]

        def save() -> None:
            save_file({"weight": weights}, files[0])
            torch.save({"state": {0: states}}, files[1])

        for _ in range(options.rounds):
            writer = ManifestWriter()
            begun = seconds(writer.begin, checkpoint, 1, None)
            times.setdefault("writing the files", []).append(seconds(save))
            times.setdefault("the manifest", []).append(begun + seconds(writer.complete))
            written = read_manifest(checkpoint)
            assert written is not None and changed_files(checkpoint, written) == []
            check = seconds(changed_files, checkpoint, written)
            times.setdefault("its check when resuming", []).append(check)
            for name, function in HASHES.items():
                for threads in (1, 2):
                    taken = seconds(hash_all, files, function, threads)
                    times.setdefault(f"{name}, threads: {threads}", []).append(taken)

    print(f"{options.gigabytes:g} GB\n\n| | median s | least s | least s of all cores |\n|---|---:|---:|---:|")
    for name, taken in times.items():
        (median, _), (least, cores) = torch.stack(taken).median(0).values, torch.stack(taken).min(0).values
        print(f"| {name} | {median:.2f} | {least:.2f} | {cores:.2f} |")


if __name__ == "__main__":
    main()
