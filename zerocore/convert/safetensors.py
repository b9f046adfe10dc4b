"""The safetensors format: 8 bytes with the header's length, the header in JSON, the data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from zerocore.convert.entry import Entry, Run, raw_bytes, read_runs

# The format's names of dtypes that torch has too.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # bytes; more is refused by all readers


def check_entries(entries: Iterable[Entry]) -> None:
    """Raises ValueError for what the format cannot hold."""
    for entry in entries:
        if entry.dtype not in NAMES:
            raise ValueError(
                f"{entry.name}: expected a dtype of the safetensors format, got {entry.dtype}; "
                "export to a .pt file, or use --dtype"
            )
        if entry.name == "__metadata__":
            raise ValueError(
                f"{entry.name}: expected another name of a tensor: the safetensors format uses "
                "it; export to a .pt file"
            )


def write(file: BinaryIO, entries: Sequence[Entry]) -> None:
    """Writes a whole file, part by part.

    Args:
        entries: see `check_entries`.
    """
    # Wide dtypes first: then each tensor is aligned to its dtype when the file is mapped.
    entries = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    end = 0
    for entry in entries:
        begin, end = end, end + entry.nbytes
        header[entry.name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ValueError(
            f"expected at most {MAX_HEADER} bytes of names in a file, got {len(text)}; use "
            "--shard-bytes"
        )
    file.write(len(text).to_bytes(8, "little") + text)
    for entry in entries:
        for part in entry.stream():
            file.write(raw_bytes(part))


def read(path: Path) -> list[Entry]:
    """The entries of a file.

    Raises:
        RuntimeError: if it is not a whole safetensors file.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise RuntimeError(
                f"{path}: expected a safetensors file, got {size} bytes that claim a header of "
                f"{length}"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = [_entry(path, 8 + length, name, field) for name, field in header.items()]
        spans = sorted(tuple(field["data_offsets"]) for field in header.values())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RuntimeError(
            f"{path}: expected the header of a safetensors file, got {error!r}; the file is damaged"
        ) from error
    end = 0
    for begin, next_end in spans:
        if begin != end:
            raise RuntimeError(
                f"{path}: expected a tensor at byte {end} of the data, got one at {begin}; the "
                "file is damaged"
            )
        end = next_end
    if 8 + length + end != size:
        raise RuntimeError(f"{path}: expected {8 + length + end} bytes, got {size}; it is cut off")
    return entries


def _entry(path: Path, data: int, name: str, field: dict[str, Any]) -> Entry:
    dtype, shape, (begin, end) = field["dtype"], field["shape"], field["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"the dtype {dtype!r} of {name}")
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"the shape {shape} and offsets {begin}, {end} of {name}")
    if math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise ValueError(f"{end - begin} bytes of {name} of shape {shape} in {dtype}")
    runs = (Run(path, data + begin, end - begin),)
    return Entry(name, tuple(shape), DTYPES[dtype], partial(read_runs, runs, DTYPES[dtype]))
