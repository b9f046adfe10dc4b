"""Directories of checkpoints: complete or not there at all.

[Note: directories] A checkpoint is written to a directory beside its own, `NAME.tmp-HOST-xxxxxxxx`,
which gets its name by one rename when every file, the marker last, is durable. Until it has it, the
process of the first rank holds an exclusive lock (flock) on the directory, which ends with the
process. The next save beside it removes what has such a name of the same host, no lock, and has not
changed for YOUNG_SECONDS.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerocore.checkpoint.files import Sum, sync_directory, write_durably
from zerocore.checkpoint.format import METADATA, Catalog

MARKER = "zerocore.json"
FORMAT = 1
YOUNG_SECONDS = 60.0  # a directory may have been made, and not locked yet
_TEMPORARY = re.compile(r".+\.tmp-(.+)-[0-9a-f]{8}")


@dataclass(frozen=True)
class Marker:
    """What the last file of a checkpoint says about it.

    Attributes:
        files: size and checksum of every other file, by name.
        world: how many ranks saved it.
        saved: when, in nanoseconds since 1970; greater than that of any older one beside it.
        about: versions and how the model was sharded, for people.
    """

    files: dict[str, Sum]
    world: int
    saved: int
    about: dict[str, Any] = field(default_factory=dict)

    def dump(self) -> bytes:
        """As the file has it: JSON with a checksum of the rest."""
        body = asdict(self) | {
            "format": FORMAT,
            "files": {n: list(s) for n, s in self.files.items()},
        }
        body["crc32"] = zlib.crc32(_canonical(body))
        return json.dumps(body, indent=1, sort_keys=True).encode() + b"\n"

    @staticmethod
    def parse(contents: bytes) -> Marker:
        """Raises ValueError for anything that `dump` has not given."""
        try:
            body = json.loads(contents)
            crc32 = body.pop("crc32")
            intact = crc32 == zlib.crc32(_canonical(body))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"expected a marker of zerocore, got damaged text ({error})") from None
        if not intact:
            raise ValueError("expected a marker of zerocore, got one whose checksum is wrong")
        if body.get("format") != FORMAT:
            raise ValueError(
                f"expected a checkpoint of format {FORMAT}, got format {body.get('format')}, of "
                "another version of zerocore"
            )
        try:
            files = {name: Sum(*values) for name, values in body["files"].items()}
            marker = Marker(files, body["world"], body["saved"], body["about"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"expected a marker of zerocore, got one without {error}") from None
        if METADATA not in files:
            raise ValueError(
                f"expected a marker of zerocore that names {METADATA}, got one without"
            )
        return marker


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


class Temporary:
    """A directory that is to become a checkpoint; see [Note: directories].

    Raises:
        OSError: if it cannot be made.
    """

    def __init__(self, final: Path) -> None:
        self.final = final
        self.path = _beside(final)
        final.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir()
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # of a file system without locks: nobody removes there
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def commit(self, metadata: bytes, files: Mapping[str, Sum], world: int, about: Any) -> Marker:
        """Makes it the checkpoint, after all ranks have written their files.

        Raises:
            OSError, ValueError: if it cannot be; nothing has the final name then.
        """
        for name, expected in files.items():
            found = (self.path / name).stat().st_size
            if found != expected.bytes:
                raise ValueError(
                    f"expected {expected.bytes} bytes in {self.path / name}, got {found}; is the "
                    "directory shared by all ranks?"
                )
        write_durably(self.path / METADATA, metadata)
        all_files = {METADATA: Sum(len(metadata), zlib.crc32(metadata)), **files}
        before = [marker.saved for _, marker in complete(self.final.parent)]
        saved = max([time.time_ns(), *(moment + 1 for moment in before)])
        marker = Marker(all_files, world, saved, about)
        write_durably(self.path / MARKER, marker.dump())
        sync_directory(self.path)
        require_free(self.final)
        self.path.rename(self.final)
        sync_directory(self.final.parent)
        self.close()
        return marker

    def remove(self) -> None:
        """Removes it, if it has not become the checkpoint."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Gives the lock back."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{_host()}-{secrets.token_hex(4)}")


def require_free(path: Path) -> None:
    """Raises FileExistsError if there is something at `path`, ValueError for a reserved name."""
    if is_temporary(path):
        raise ValueError(
            f"expected a name of a checkpoint, got {path.name!r}, which is how unfinished ones are "
            "called"
        )
    if os.path.lexists(path):
        raise FileExistsError(
            f"expected a path where nothing is, got {path}, which exists; checkpoints are not "
            "overwritten: use a new name for each, and keep=N to remove old ones"
        )


def is_temporary(path: Path) -> bool:
    """Whether the name is that of an unfinished checkpoint."""
    return _TEMPORARY.fullmatch(path.name) is not None


def remove_stale(parent: Path) -> None:
    """Removes unfinished checkpoints of processes of this host that are gone."""
    for path in _directories(parent):
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or match[1] != _host() or not _looks_unfinished(path):
            continue
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < YOUNG_SECONDS:
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _looks_unfinished(path: Path) -> bool:
    try:
        return all(
            entry.name in (METADATA, MARKER) or entry.name.endswith(".distcp")
            for entry in path.iterdir()
        )
    except OSError:
        return False


def read_marker(path: Path) -> Marker | None:
    """The marker of a checkpoint; None if it has none.

    Raises:
        ValueError: if it is damaged.
        OSError: if it cannot be read.
    """
    try:
        contents = (path / MARKER).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Marker.parse(contents)


def open_catalog(path: Path) -> tuple[Catalog, Marker | None]:
    """What a checkpoint has, compared with its marker but for the contents of large files.

    Returns:
        The marker is None for checkpoints of others.

    Raises:
        ValueError: if it is damaged or not complete.
        OSError: if it cannot be read.
    """
    marker = read_marker(path)
    for name, expected in marker.files.items() if marker else ():
        _require_size(path / name, expected.bytes)
    contents = (path / METADATA).read_bytes()
    if marker is not None:
        found = Sum(len(contents), zlib.crc32(contents))
        require_sum(path / METADATA, found, marker.files[METADATA])
    catalog = Catalog(path, contents)
    if marker is None:
        if "zerocore.format" in catalog:
            raise ValueError(
                f"expected the file {path / MARKER}, got a checkpoint of zerocore without it, "
                "which is not complete"
            )
        for name, size in catalog.files().items():
            _require_size(path / name, size, at_least=True)
    return catalog, marker


def require_sum(path: Path, found: Sum, expected: Sum) -> None:
    """Raises ValueError for a file with another checksum."""
    if found != expected:
        raise ValueError(
            f"expected {path} with the CRC-32 {expected.crc32:08x}, got {found.crc32:08x}; the "
            "checkpoint is damaged"
        )


def _require_size(path: Path, expected: int, at_least: bool = False) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise ValueError(
            f"expected the file {path}, got {error}; the checkpoint is damaged"
        ) from None
    if found < expected or (found > expected and not at_least):
        raise ValueError(
            f"expected {expected} bytes in {path}, got {found}; the checkpoint is damaged"
        )


def complete(directory: Path) -> list[tuple[Path, Marker]]:
    """The complete checkpoints of zerocore in a directory, oldest first.

    Complete: with a marker, and with all files that it names in their full size.
    """
    found = []
    for path in _directories(directory):
        if is_temporary(path):
            continue
        try:
            marker = read_marker(path)
            if marker is None:
                continue
            sizes = {name: (path / name).stat().st_size for name in marker.files}
        except (OSError, ValueError):
            continue
        if all(sizes[name] == expected.bytes for name, expected in marker.files.items()):
            found.append((path, marker))
    return sorted(found, key=lambda item: item[1].saved)


def remove_older(path: Path, keep: int) -> None:
    """Leaves the `keep` newest complete checkpoints in the directory of the one at `path`."""
    found = [other for other, _ in complete(path.parent) if other != path]
    for other in found[: max(0, len(found) - (keep - 1))]:
        gone = _beside(other)  # half of it must never be taken for a checkpoint
        try:
            other.rename(gone)
        except FileNotFoundError:
            continue  # somebody else keeps this directory short too
        except OSError as error:  # the new checkpoint is complete all the same
            warnings.warn(f"zerocore.save: keep: {other} cannot be removed: {error}", stacklevel=2)
            continue
        shutil.rmtree(gone, ignore_errors=True)


def _directories(parent: Path) -> Iterator[Path]:
    try:
        entries = sorted(parent.iterdir())
    except OSError:
        return
    yield from (path for path in entries if path.is_dir() and not path.is_symlink())
