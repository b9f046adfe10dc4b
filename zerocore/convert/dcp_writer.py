"""A directory as torch.distributed.checkpoint writes it, from entries."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from zerocore.checkpoint.files import Progress, Writer, write_durably
from zerocore.checkpoint.format import METADATA, make_metadata
from zerocore.convert.entry import Entry

CHUNK_BYTES = 8 << 20  # of a tensor, saved as one: readers read all of it for any part of it


def write(folder: Path, items: Mapping[tuple[str | int, ...], Any]) -> None:
    """Writes a checkpoint into a folder, part by part.

    Args:
        items: entries and plain values by the names, in nested dicts, under which they will be
            loaded.

    Raises:
        OSError: if it cannot be written.
    """
    with Writer(folder, "__0_", Progress()) as writer:
        for path, item in items.items():
            if not isinstance(item, Entry):
                writer.put_object(path, item)
                continue
            for row, part in _rows(item):
                offsets = (row, *[0] * (len(item.shape) - 1))[: len(item.shape)]
                writer.put_box(path, part, item.shape, offsets)
    write_durably(folder / METADATA, make_metadata(writer.saved, {}))


def _rows(entry: Entry) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, tensor) of chunks of whole rows that are small enough to be read at once.

    Readers read a whole chunk for each part of it that they want.
    """
    if entry.numel == 0 or not entry.shape:
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        for part in entry.stream():
            whole = part.view(())
        yield 0, whole
        return
    row = math.prod(entry.shape[1:])
    rows = max(1, CHUNK_BYTES // (row * entry.dtype.itemsize))
    for i, part in enumerate(entry.parts(rows * row)):
        yield i * rows, part.view(-1, *entry.shape[1:])
