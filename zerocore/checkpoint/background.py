"""A save that goes on while training does; one at a time in a process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("zerocore")


class Saving:
    """A save under way, as `zerocore.save(..., async_=True)` gives it.

    The process does not end before it is done. Nor may the process groups: call `result()` before
    torch.distributed.destroy_process_group().
    """

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        self._path = path
        self._write = write
        self._error: Exception | None = None
        self._told = False
        # No daemon: the interpreter waits for it.
        self._thread = threading.Thread(target=self._run, name=f"zerocore.save {path}")

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> Path:
        """Waits until the checkpoint is there, on all ranks; its path.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            TimeoutError: if it is not done by then.
            Exception: what `zerocore.save` would have raised.
        """
        self._thread.join(timeout)
        if not self.done():
            raise TimeoutError(
                f"zerocore.save: expected {self._path} within {timeout} s, got no end yet"
            )
        self._told = True
        if self._error is not None:
            raise self._error
        return self._path

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            logger.error("zerocore.save: %s was not saved: %s", self._path, error)
            self._error = error

    def untold_error(self) -> Exception | None:
        """Waits; an error that nobody has been told of, once."""
        self._thread.join()
        told, self._told = self._told, True
        return None if told else self._error


_latest: Saving | None = None


def start(path: Path, write: Callable[[], None]) -> Saving:
    """Runs `write` on a thread. The one before must have been waited for."""
    global _latest
    _latest = Saving(path, write)
    _latest._thread.start()
    return _latest


def wait() -> None:
    """Waits for the save under way, if there is one; its error is left to others."""
    if _latest is not None:
        _latest._thread.join()


def require_saved() -> None:
    """Raises RuntimeError if the save before failed, and nobody has been told.

    To be called after `wait`.
    """
    error = _latest.untold_error() if _latest is not None else None
    if error is not None:
        raise RuntimeError(
            f"zerocore.save: expected the save before this one to succeed, got: {error}"
        ) from error
