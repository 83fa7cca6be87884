"""Checksums of files, computed by several threads."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHUNK_BYTES = 1 << 24
"""Bytes of a file that one thread reads at a time."""
_THREADS = min(8, os.cpu_count() or 1)


def checksums(paths: Iterable[Path]) -> dict[Path, str]:
    """Compute the checksum of every file: CRC-32 over the CRC-32s of its chunks.

    It detects every flip of a single bit, and all but one in 2³² other changes. A cryptographic hash would take several
    times as long.

    Raises:
        OSError: a file cannot be read.
    """
    chunks = [(path, start) for path in paths for start in range(0, max(path.stat().st_size, 1), CHUNK_BYTES)]
    with ThreadPoolExecutor(_THREADS) as pool:
        crcs: dict[Path, int] = {}
        for (path, _), crc in zip(chunks, pool.map(_crc_of_chunk, chunks), strict=True):
            crcs[path] = zlib.crc32(crc.to_bytes(4, "little"), crcs.get(path, 0))
    return {path: f"{crc:08x}" for path, crc in crcs.items()}


def _crc_of_chunk(chunk: tuple[Path, int]) -> int:
    path, start = chunk
    with path.open("rb") as file:  # buffered: an unbuffered read may return less than it was asked for
        file.seek(start)
        return zlib.crc32(file.read(CHUNK_BYTES))
