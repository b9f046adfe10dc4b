"""What a conversion tells while it works."""

from __future__ import annotations

from collections.abc import Callable

Note = Callable[[str], None]  # something that the user should know
Progress = Callable[[int, int], None]  # bytes done, bytes in all


def silent(*_: object) -> None:
    """For callers who want to know nothing."""


class Count:
    """Adds up the bytes that are done.

    Args:
        total: bytes in all.
    """

    def __init__(self, total: int, progress: Progress) -> None:
        self._total, self._progress, self._done = total, progress, 0

    def __call__(self, nbytes: int) -> None:
        """So many bytes more."""
        self._done += nbytes
        self._progress(self._done, self._total)
