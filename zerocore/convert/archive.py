"""Archives as torch.save writes them: a zip file with a pickle and the bytes of each storage."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import _utils

from zerocore.checkpoint.section import Section
from zerocore.convert.entry import Entry, Run, raw_bytes, read_runs, split
from zerocore.convert.errors import summary

ALIGNMENT = 64  # of each storage in the file, as torch has it: for files that are mapped

# torch.save names these dtypes by a class of storages, all others by the dtype.
STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}


class Archive:
    """An archive in a file, or in a part of one, that is being read.

    Attributes:
        value: what was saved, with tensors on the meta device in place of the saved ones.

    Args:
        begin, length: where the archive lies in the file; None: to its end.

    Raises:
        RuntimeError: if there is no such archive, or more than tensors and plain values in it.
    """

    def __init__(self, path: Path, begin: int = 0, length: int | None = None) -> None:
        self._path, self._begin = path, begin
        if length is None:
            length = path.stat().st_size - begin
        with open(path, "rb", buffering=0) as file:
            section = io.BufferedReader(Section(file, begin, length))
            try:
                self._records = dict(_records(section))
                section.seek(0)
                self.value = torch.load(section, map_location="meta", weights_only=True)
            except Exception as error:  # a damaged file can make any of them fail in any way
                raise RuntimeError(
                    f"{path}: expected {length} bytes from byte {begin} on that torch.load("
                    f"weights_only=True) reads, got {summary(error)}"
                ) from error

    def entry(self, name: str, tensor: torch.Tensor) -> Entry:
        """For one of the meta tensors in `value`; see `run` for errors."""
        run, dtype = self.run(name, tensor), tensor.dtype
        if run is not None:
            return Entry(name, tuple(tensor.shape), dtype, partial(read_runs, (run,), dtype))
        load = partial(self.load, name, tensor)
        return Entry(name, tuple(tensor.shape), dtype, partial(split, load))

    def run(self, name: str, tensor: torch.Tensor) -> Run | None:
        """Where the elements of a meta tensor are; None if they are not there in row-major order.

        Raises:
            RuntimeError: if its bytes are not in the archive.
        """
        whole = self._storage(name, tensor)
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        if tensor.nbytes == whole.nbytes:
            return whole
        begin = whole.offset + tensor.storage_offset() * tensor.dtype.itemsize
        return Run(self._path, begin, tensor.nbytes)

    def load(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that a meta tensor stands for, contiguous; see `run` for errors."""
        whole, dtype = self._storage(name, tensor), tensor.dtype
        parts = list(read_runs((whole,), dtype, max(1, whole.nbytes // dtype.itemsize)))
        values = parts[0] if parts else torch.empty(0, dtype=dtype)
        values = values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        values = values.conj() if tensor.is_conj() else values
        values = values.neg() if tensor.is_neg() else values
        return values.resolve_conj().contiguous()

    def _storage(self, name: str, tensor: torch.Tensor) -> Run:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else tensor.layout
            raise RuntimeError(f"{self._path}: expected a dense tensor as {name}, got {kind}")
        storage = tensor.untyped_storage()
        offset, nbytes = storage._checkpoint_offset, storage.nbytes()
        stored, crc = self._records.get(offset, (None, None))
        if stored != nbytes:
            raise RuntimeError(
                f"{self._path}: expected {nbytes} bytes of {name} at byte {offset} of the archive, "
                f"got {'none' if stored is None else stored}; the file is damaged"
            )
        return Run(self._path, self._begin + offset, nbytes, crc)


def _records(file: BinaryIO) -> Iterator[tuple[int, tuple[int, int | None]]]:
    """(first byte, (bytes, crc32)) of each file in a zip file."""
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            file.seek(info.header_offset + 26)
            name, extra = struct.unpack("<HH", file.read(4))
            # torch.utils.serialization.config.save.compute_crc32 = False leaves zeros.
            yield info.header_offset + 30 + name + extra, (info.file_size, info.CRC or None)


class _Storage:
    """Stands for the storage of an entry in the pickle."""

    def __init__(self, entry: Entry, key: str) -> None:
        self.entry, self.key = entry, key


class _Pickler(pickle.Pickler):
    """Pickles entries as the tensors that they stand for."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[_Storage] = []

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Entry):
            return NotImplemented
        storage = _Storage(value, str(len(self.storages)))
        self.storages.append(storage)
        stride = torch.empty(value.shape, device="meta").stride()
        arguments = (storage, 0, value.shape, stride, False, OrderedDict())
        if value.dtype in STORAGES:
            return _utils._rebuild_tensor_v2, arguments
        return _utils._rebuild_tensor_v3, (*arguments, value.dtype)

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        kind = STORAGES.get(value.entry.dtype, torch.UntypedStorage)
        count = value.entry.nbytes if kind is torch.UntypedStorage else value.entry.numel
        return ("storage", kind, value.key, "cpu", count)


def write(file: BinaryIO, value: Any) -> None:
    """Writes a whole archive, part by part, that torch.load(weights_only=True) reads.

    Not by torch.save under torch.serialization.skip_data: bytes that are filled in afterwards do
    not have the checksums that the archive then holds.

    Args:
        value: entries in dicts and lists, and plain values.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        archive.writestr("archive/data.pkl", buffer.getvalue())
        archive.writestr("archive/byteorder", sys.byteorder)
        for storage in pickler.storages:
            info = zipfile.ZipInfo(f"archive/data/{storage.key}")
            info.file_size = storage.entry.nbytes
            info.extra = _padding(file.tell() + 30 + len(info.filename))
            with archive.open(info, "w", force_zip64=True) as record:
                for part in storage.entry.stream():
                    record.write(raw_bytes(part))
        archive.writestr("archive/version", "3\n")


def _padding(begin: int) -> bytes:
    """An extra field that aligns the data of a record whose extra fields begin at `begin`."""
    zip64, head = 20, 4  # zipfile adds the first one; each field has a name and a length
    size = -(begin + zip64 + head) % ALIGNMENT
    return struct.pack("<2sH", b"FB", size) + bytes(size)
