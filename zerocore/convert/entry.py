"""A named tensor that lies in files and is read part by part."""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

# Large enough for disks, small beside what a Python process takes anyway.
PART_BYTES = 4 << 20


@dataclass(frozen=True)
class Entry:
    """A tensor to be read.

    Attributes:
        name: in the model, or in the checkpoint.
        shape, dtype: of the tensor.
        parts: `parts(step)` gives 1-D CPU tensors of `step` elements (the last may be shorter) that
            together are the tensor in row-major order. Only one of them need be alive at a time.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Callable[[int], Iterator[torch.Tensor]]

    @property
    def numel(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * self.dtype.itemsize

    def stream(self) -> Iterator[torch.Tensor]:
        """The parts, of a size that suits files."""
        return self.parts(max(1, PART_BYTES // self.dtype.itemsize))

    def cast(self, dtype: torch.dtype | None) -> Entry:
        """The same in another dtype, if it is of floating point; None keeps it.

        Its parts raise ValueError for a finite value that is infinite in `dtype`.
        """
        if dtype is None or dtype == self.dtype or not self.dtype.is_floating_point:
            return self

        def parts(step: int) -> Iterator[torch.Tensor]:
            for part in self.parts(step):
                yield _narrowed(self.name, part, dtype)

        return dataclasses.replace(self, dtype=dtype, parts=parts)

    def counted(self, count: Callable[[int], None]) -> Entry:
        """The same, which tells `count` the bytes of each part once it has been used."""

        def parts(step: int) -> Iterator[torch.Tensor]:
            for part in self.parts(step):
                yield part
                count(part.nbytes)

        return dataclasses.replace(self, parts=parts)


def _narrowed(name: str, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    result = part.to(dtype)
    infinite = result.isinf()
    if infinite.any():
        lost = part[infinite].float()
        lost = lost[lost.isfinite()]
        if len(lost):
            raise ValueError(
                f"dtype: expected values of at most {torch.finfo(dtype).max:g} for {dtype}, got "
                f"{lost[0]:g} in {name}; choose a wider dtype"
            )
    return result


@dataclass(frozen=True)
class Run:
    """Consecutive elements of a tensor, one after the other in a file.

    Attributes:
        offset: of the first byte in the file.
        nbytes: how many.
        crc32: of these bytes; None where the file does not tell.
    """

    path: Path
    offset: int
    nbytes: int
    crc32: int | None = None


class _RunReader:
    """Reads runs one after the other as if they were one file."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs = iter(runs)
        self._run: Run | None = None
        self._file: int | None = None
        self._done = 0  # bytes of the run
        self._crc = 0  # of these bytes

    def fill(self, target: memoryview) -> None:
        """Reads the next bytes into `target`."""
        while len(target):
            if self._run is None or self._done == self._run.nbytes:
                self._open(next(self._runs))
                continue
            wanted = target[: self._run.nbytes - self._done]
            count = os.preadv(self._file, [wanted], self._run.offset + self._done)
            if count == 0:
                raise RuntimeError(
                    f"{self._run.path}: expected {self._run.nbytes} bytes from byte "
                    f"{self._run.offset} on, got {self._done}; the file is cut off"
                )
            if self._run.crc32 is not None:
                self._crc = zlib.crc32(wanted[:count], self._crc)
            self._done += count
            target = target[count:]
            if self._done == self._run.nbytes:
                self._check(self._run)

    def _open(self, run: Run) -> None:
        if self._run is None or self._run.path != run.path:
            self.close()
            self._file = os.open(run.path, os.O_RDONLY)
        self._run, self._done, self._crc = run, 0, 0

    def _check(self, run: Run) -> None:
        if run.crc32 is not None and self._crc != run.crc32:
            raise RuntimeError(
                f"{run.path}: expected checksum {run.crc32:08x} of the {run.nbytes} bytes from "
                f"byte {run.offset} on, got {self._crc:08x}; the file is damaged"
            )

    def close(self) -> None:
        """Lets go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_runs(runs: Sequence[Run], dtype: torch.dtype, step: int) -> Iterator[torch.Tensor]:
    """The elements of `runs` in tensors of `step` of them, each with memory of its own.

    Raises:
        RuntimeError: for a file that is too short, and for bytes whose checksum is another.
    """
    numel = sum(run.nbytes for run in runs) // dtype.itemsize
    reader = _RunReader(runs)
    try:
        for start in range(0, numel, step):
            part = torch.empty(min(step, numel - start), dtype=dtype)
            reader.fill(raw_bytes(part))
            yield part
    finally:
        reader.close()


def split(load: Callable[[], torch.Tensor], step: int) -> Iterator[torch.Tensor]:
    """The same for a tensor that must be in memory as a whole."""
    flat = load().reshape(-1)
    if flat.numel():
        yield from flat.split(step)


def raw_bytes(part: torch.Tensor) -> memoryview:
    """The memory of a 1-D, contiguous CPU tensor."""
    return memoryview(part.view(torch.uint8).numpy())
