"""The files of a checkpoint: written with checksums, verified, and read once."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import threading
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import torch

from zerocore.checkpoint.format import Catalog, Path, Read, Saved
from zerocore.checkpoint.section import Section
from zerocore.checkpoint.shards import Chunk, FlatShard

FILE_BYTES = (
    256 * 2**20
)  # a rank's next file begins beyond this: it is synced while that is written
BLOCK_BYTES = 4 * 2**20  # written, read and summed at a time: what caches hold


class Sum(NamedTuple):
    """Size and CRC-32 of a file."""

    bytes: int
    crc32: int


class Progress:
    """What a rank has done so far, as another thread sees it.

    Attributes:
        bytes: read or written.
        cancelled: asks for an end: another rank has failed.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.cancelled = False

    def add(self, count: int) -> None:
        """Counts; raises InterruptedError once it is cancelled."""
        self.bytes += count
        if self.cancelled:
            raise InterruptedError("expected to go on, got the failure of another rank")


class _Stream(io.RawIOBase):
    """A file that sums what is written to it."""

    def __init__(self, path: FilePath, progress: Progress) -> None:
        super().__init__()
        self.file = open(path, "xb", buffering=2**16)
        self.sum = Sum(0, 0)
        self.error: Exception | None = None  # the first one: torch.save hides it behind its own
        self._progress = progress

    def writable(self) -> bool:
        return True

    def write(self, contents: Any) -> int:
        """All of a bytes-like object, block by block."""
        view = memoryview(contents).cast("B")
        try:
            self._write(view)
        except Exception as error:
            self.error = self.error or error
            raise
        return len(view)

    def _write(self, view: memoryview) -> None:
        for start in range(0, len(view), BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            self.sum = Sum(self.sum.bytes + len(block), zlib.crc32(block, self.sum.crc32))
            self.file.write(block)
            self._progress.add(len(block))


class _Syncer(threading.Thread):
    """Makes files durable and closes them, while others are written."""

    def __init__(self) -> None:
        super().__init__(name="zerocore fsync", daemon=True)
        self._queue: queue.SimpleQueue[io.BufferedWriter | None] = queue.SimpleQueue()
        self._error: OSError | None = None
        self.start()

    def run(self) -> None:
        while (file := self._queue.get()) is not None:
            try:
                with file:
                    os.fsync(file.fileno())
            except OSError as error:
                self._error = self._error or error

    def put(self, file: io.BufferedWriter) -> None:
        """Takes a file over. Its buffer is written here, where an error is raised at once."""
        file.flush()
        self._queue.put(file)

    def finish(self) -> None:
        """Waits for all files, as often as it is called.

        Raises:
            OSError: if one of them could not be written.
        """
        self._queue.put(None)
        self.join()
        if self._error is not None:
            raise self._error


class Writer:
    """Writes this rank's part of a checkpoint, in files of about FILE_BYTES.

    Everything in a file is what torch.save gives, as torch.distributed.checkpoint has it. Tensors
    are written from where they are, without a copy (from another device: one chunk at a time).

    At the end of a `with` block all of it is durable.

    Args:
        directory: which exists.
        prefix: of the files' names, another one on each rank.

    Attributes:
        saved: what was written, and where.
        sums: of the files, after the block.

    Raises:
        OSError: if something cannot be written, at the end of the block at the latest.
    """

    def __init__(self, directory: FilePath, prefix: str, progress: Progress) -> None:
        self._directory = directory
        self._prefix = prefix
        self._progress = progress
        self._stream: _Stream | None = None
        self._name = ""
        self._syncer = _Syncer()
        self.saved: list[Saved] = []
        self.sums: dict[str, Sum] = {}

    def put_shard(self, path: Path, shard: FlatShard) -> None:
        """Writes the boxes of a tensor."""
        for chunk in shard.chunks():
            self.put_box(path, chunk.values, tuple(shard.whole), chunk.offsets)

    def put_box(
        self, path: Path, values: torch.Tensor, whole: tuple[int, ...], offsets: tuple[int, ...]
    ) -> None:
        """Writes the box of a tensor of shape `whole` that begins at `offsets`."""
        place = self._save(_alone(values))
        self.saved.append(Saved(path, *place, whole, values.dtype, offsets, tuple(values.shape)))

    def put_object(self, path: Path, value: Any) -> None:
        """Writes anything that can be pickled."""
        self.saved.append(Saved(path, *self._save(value)))

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self._end_file()
                self._syncer.finish()
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Closes what is still open."""
        if self._stream is not None:
            with contextlib.suppress(OSError):  # its buffer may not fit on the disk
                self._stream.file.close()
        with contextlib.suppress(OSError):
            self._syncer.finish()

    def _save(self, value: Any) -> tuple[str, int, int]:
        if self._stream is None or self._stream.sum.bytes >= FILE_BYTES:
            self._end_file()
            self._name = f"{self._prefix}{len(self.sums)}.distcp"
            self._stream = _Stream(self._directory / self._name, self._progress)
        position = self._stream.sum.bytes
        try:
            torch.save(value, self._stream)
        except Exception as error:
            raise (self._stream.error or error) from error
        return self._name, position, self._stream.sum.bytes - position

    def _end_file(self) -> None:
        if self._stream is not None:
            self.sums[self._name] = self._stream.sum
            self._syncer.put(self._stream.file)
            self._stream = None


def _alone(values: torch.Tensor) -> torch.Tensor:
    """The same on the CPU, over a storage that has nothing else: torch.save writes whole storages.

    A dense view on the CPU is not copied.
    """
    values = values.detach()
    if values.device.type != "cpu":
        return values.cpu()
    if values.numel() == 0:
        return torch.empty_like(values)
    flat = values.as_strided((values.numel(),), (1,)).view(torch.uint8)
    own = torch.from_numpy(flat.numpy()).view(values.dtype)
    return own.as_strided(values.shape, values.stride())


def write_durably(path: FilePath, contents: bytes) -> None:
    """Writes a new file."""
    with open(path, "xb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: FilePath) -> None:
    """Makes the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sum_file(path: FilePath, progress: Progress) -> Sum:
    """Reads a whole file.

    Raises:
        OSError: if it cannot be read.
    """
    count = crc = 0
    block = memoryview(bytearray(BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while length := file.readinto(block):
            crc = zlib.crc32(block[:length], crc)
            count += length
            progress.add(length)
    return Sum(count, crc)


def read_shards(catalog: Catalog, shards: Mapping[str, FlatShard], progress: Progress) -> None:
    """Fills shards with what a checkpoint has under their keys, in place.

    Each saved chunk is read once, and one at a time is in memory.

    Raises:
        OSError, RuntimeError: if it cannot be read.
    """
    reads: dict[tuple[str, int, int], list[tuple[Read, Chunk]]] = {}
    for key, shard in shards.items():
        chunks = [chunk for chunk in shard.chunks() if chunk.values.numel() > 0]
        for read in catalog.reads(key, [(chunk.offsets, chunk.sizes) for chunk in chunks]):
            place = (read.file, read.position, read.length)
            reads.setdefault(place, []).append((read, chunks[read.local]))
    with contextlib.ExitStack() as stack, torch.no_grad():
        name = file = None
        for place in sorted(reads):
            if place[0] != name:
                stack.close()
                name = place[0]
                file = stack.enter_context(open(catalog.path / name, "rb", buffering=0))
            saved = torch.load(Section(file, *place[1:]), map_location="cpu", weights_only=True)
            for read, chunk in reads[place]:
                source = _narrow(saved, read.source, read.sizes)
                _narrow(chunk.values, read.target, read.sizes).copy_(source)
            del saved, source  # before the next one is read
            progress.add(place[2])


def _narrow(tensor: torch.Tensor, offsets: Iterable[int], sizes: Iterable[int]) -> torch.Tensor:
    return tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
