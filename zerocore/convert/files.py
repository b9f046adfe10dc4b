"""Files and folders that appear under their names when they are complete, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from zerocore.checkpoint.files import sync_directory


def require_space(folder: Path, nbytes: int) -> None:
    """Raises OSError if the file system of `folder` has less than `nbytes` free."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < nbytes:
        raise OSError(errno.ENOSPC, f"expected {nbytes:,} free bytes, got {free:,}", str(folder))


def _require_parent(folder: Path) -> None:
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise ValueError(f"expected a folder {parent} to put {folder.name} in, got none")


def flush(file: BinaryIO) -> None:
    """Brings what was written to the disk."""
    file.flush()
    os.fsync(file.fileno())


class NewFiles:
    """Files of one folder that take their names, in order, at the end of a `with` block.

    If the block fails, nothing of them is left, nor of a folder that did not exist before.

    Args:
        folder: is made if need be, in one that exists.
        replaced: names of files there that go before the new ones come: a reader may find the old
            files, the new ones or incomplete new ones, but never a mixture.
    """

    def __init__(self, folder: Path, replaced: Sequence[str] = ()) -> None:
        self._folder = folder
        self._replaced = replaced
        self._made = False
        self._suffix = f".tmp-{uuid.uuid4().hex[:8]}"
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> NewFiles:
        if not self._folder.exists():
            _require_parent(self._folder)
            self._folder.mkdir()
            self._made = True
        return self

    def open(self, name: str) -> BinaryIO:
        """The file that will have this name, to be written from its beginning."""
        file = open(self._temporary(name), "w+b")
        self._files[name] = file
        return file

    def close(self, name: str) -> None:
        """Completes a file."""
        flush(self._files[name])
        self._files[name].close()

    def _temporary(self, name: str) -> Path:
        return self._folder / f".{name}{self._suffix}"

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._clean()

    def _finish(self) -> None:
        for name, file in self._files.items():
            if not file.closed:
                self.close(name)
        for name in self._replaced:
            (self._folder / name).unlink(missing_ok=True)
        for name in list(self._files):
            os.replace(self._temporary(name), self._folder / name)
            del self._files[name]
        self._made = False
        sync_directory(self._folder)
        sync_directory(self._folder.absolute().parent)

    def _clean(self) -> None:
        for name, file in self._files.items():
            with contextlib.suppress(OSError):  # what its buffer holds may not fit on the disk
                file.close()
            self._temporary(name).unlink(missing_ok=True)
        if self._made:
            with contextlib.suppress(OSError):  # somebody else may have put something there
                self._folder.rmdir()


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which takes the name `folder` at the end of the block.

    If the block fails, nothing of it is left.
    """
    folder = folder.absolute()
    _require_parent(folder)
    temporary = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    temporary.mkdir()
    try:
        yield temporary
        sync_directory(temporary)
        os.rename(temporary, folder)  # over an empty folder at most
        sync_directory(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
