"""Where the traces of ranks are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def file_of(path: Path, rank: int, world: int) -> Path:
    """Where a rank's trace goes that was given this path.

    Raises:
        IsADirectoryError: if it is a folder's.
    """
    _require_file("zerocore.trace: path", path)
    return path if world == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix or '.json'}")


def ranks_beside(path: Path) -> list[Path]:
    """The files that the ranks of a run wrote for `zerocore.trace(path)`, by rank."""
    found = {}
    for other in path.parent.glob("*.rank*"):
        begin, _, number = other.stem.rpartition(".rank")
        if (begin, other.suffix) == (path.stem, path.suffix or ".json") and number.isdecimal():
            found[int(number)] = other
    return [found[rank] for rank in sorted(found)]


def _require_file(name: str, path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"{name}: expected a file such as out.json, got the folder {path}")


class TraceFile:
    """A file that is there under its name when all of it is written.

    Args:
        name: of what the user gave the path as, for errors.

    Raises:
        OSError: if it cannot be written.
    """

    def __init__(self, name: str, path: Path) -> None:
        _require_file(name, path)
        self.path = path
        self._temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
        if not path.parent.is_dir():
            raise FileNotFoundError(
                f"{name}: expected a file in a folder that exists, got {path}; make {path.parent} "
                "first"
            )
        try:
            self._temporary.touch()
        except OSError as error:
            raise type(error)(
                error.errno,
                f"{name}: expected a folder that can be written to, got {path.parent}: "
                f"{error.strerror}",
            ) from error

    def write(self, document: dict[str, Any]) -> None:
        """The file is there when it returns."""
        self._temporary.write_text(json.dumps(document))
        os.replace(self._temporary, self.path)

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._temporary.unlink(missing_ok=True)
