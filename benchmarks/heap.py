"""Bytes that are allocated in this process, by the count of the C library (glibc)."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

INTERVAL = 5e-4  # seconds between two looks


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
        )
    ]


_mallinfo2 = ctypes.CDLL(None).mallinfo2
_mallinfo2.restype = _Mallinfo


def allocated() -> int:
    """Bytes that malloc has given out to all threads, and nobody has freed.

    PyTorch's allocator for CPUs takes its memory from there, and keeps none itself.
    """
    info = _mallinfo2()
    return info.uordblks + info.hblkhd


class Peak:
    """Most bytes that were allocated at once inside a with block, as a thread sees them."""

    def __enter__(self) -> Peak:
        self.bytes = allocated()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(INTERVAL):
            self.bytes = max(self.bytes, allocated())

    def __exit__(self, *error: Any) -> None:
        self._over.set()
        self._thread.join()
