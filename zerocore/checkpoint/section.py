"""A range of a file as a file of its own."""

from __future__ import annotations

import io
import os
from typing import Any


class Section(io.RawIOBase):
    """Bytes [begin, begin + length) of an unbuffered file."""

    def __init__(self, file: io.RawIOBase, begin: int, length: int) -> None:
        super().__init__()
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves the place where the next read begins."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Reads into `buffer`; how many bytes."""
        target = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._begin + self._at)
        done = 0
        while done < len(target):  # the system reads no more than 2 GiB at once
            count = self._file.readinto(target[done:])
            if count == 0:
                break
            done += count
        self._at += done
        return done
