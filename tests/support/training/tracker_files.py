"""Reads what trackers have written to their files: values by name and step, and texts."""

import json
import sqlite3
import struct
import time
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

_BLOCK = 32768
_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _LAST = 1, 2, 4


class Tracked(NamedTuple):
    """The content of a tracker's files.

    Attributes:
        values: name -> [(step, value), …] in the order of the files.
        texts: name -> text, or its value in the run's configuration.
        calls: how many times values were logged; None if the files do not say.
    """

    values: dict[str, list[tuple[int, float]]]
    texts: dict[str, str]
    calls: int | None = None


def tensorboard(folder: Path) -> Tracked:
    """The event files in a folder, by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    tags = events.Tags()
    values = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags["scalars"]}
    texts = {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in tags["tensors"]}
    return Tracked(values, texts)


def wandb(folder: Path) -> Tracked:
    """The file of an offline run, by the messages that Weights & Biases defines; it has no reader in Python."""
    (file,) = folder.rglob("*.wandb")
    values, texts, calls = defaultdict(list), {}, 0
    for record in _wandb_records(file):
        if record.WhichOneof("record_type") == "history":
            calls += 1
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in row.items():
                values[name].append((row.get("train/global_step"), value))
        elif record.WhichOneof("record_type") in ("config", "run"):
            config = record.config if record.HasField("config") else record.run.config
            texts |= {item.key: json.loads(item.value_json) for item in config.update if item.key}
    return Tracked(dict(values), texts, calls)


def _wandb_records(file: Path) -> list[Any]:
    """The messages in a file. `wandb.finish` returns while another process may still write the last ones."""
    from wandb.proto import wandb_internal_pb2

    deadline = time.monotonic() + 60
    while True:
        records = [wandb_internal_pb2.Record.FromString(data) for data in _leveldb_records(file.read_bytes())]
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        assert time.monotonic() < deadline, "the run has not ended"
        time.sleep(0.05)


def _leveldb_records(content: bytes) -> list[bytes]:
    """The complete records of a log in LevelDB's format: blocks of 32 KiB, records split where a block ends."""
    records, position, unfinished = [], 7, b""  # after the file's own header
    assert content[:4] in (b":W&B", b"")
    while position + _HEADER.size <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER.size:  # padding
            position += left
            continue
        checksum, length, kind = _HEADER.unpack_from(content, position)
        data = content[position + _HEADER.size : position + _HEADER.size + length]
        if len(data) < length:
            break
        position += _HEADER.size + length
        assert checksum == zlib.crc32(data, zlib.crc32(bytes([kind])))
        unfinished = data if kind in (_FULL, _FIRST) else unfinished + data
        if kind in (_FULL, _LAST):
            records.append(unfinished)
    return records


def trackio(folder: Path) -> Tracked:
    """The database of the one project in a folder."""
    (file,) = (path for path in folder.glob("*.db"))
    with sqlite3.connect(file) as database:
        rows = [json.loads(row) for (row,) in database.execute("SELECT metrics FROM metrics ORDER BY id")]
        configs = [json.loads(row) for (row,) in database.execute("SELECT config FROM configs")]
    values = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            values[name].append((row.get("train/global_step"), value))
    return Tracked(dict(values), configs[0], len(rows))
