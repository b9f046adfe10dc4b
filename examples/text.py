"""Real text as bytes: reads files, holds some of them out, cuts sequences."""

import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

HELD_OUT = 20  # one file in so many is kept for validation


class Text(NamedTuple):
    """What a run trains and is judged on."""

    train: Tensor  # uint8 [bytes]
    valid: Tensor  # uint8 [bytes], of files that are not in `train`
    source: str  # one line for people: where it came from


def load(path: Path | None) -> Text:
    """Reads a file, a folder, or (None) the sources of the running Python's standard library.

    Of a folder, every twentieth file is held out, picked by a hash of its name: the same files on
    every rank, in every run, and wherever the folder lies. A single file gives its last twentieth.

    Raises:
        ValueError: nothing is there, or no text in it.
    """
    if path is not None and not path.exists():
        raise ValueError(f"expected a file or a folder of text, got {path}, which does not exist")
    if path is not None and path.is_file():
        content = path.read_bytes()
        cut = len(content) - len(content) // HELD_OUT
        return Text(_bytes(content[:cut]), _bytes(content[cut:]), f"{path}, its end held out")
    root, files = (path, _files(path, "*")) if path is not None else _standard_library()
    if len(files) < 2:
        raise ValueError(f"expected at least 2 files of text in folder {root}, got {len(files)}")
    shuffled = sorted(files, key=lambda name: (zlib.crc32(name.encode()), name))
    held_out = set(shuffled[: max(1, len(files) // HELD_OUT)])
    # A zero byte ends each file, so that the model can tell where one stops.
    train = b"".join(files[name] + b"\0" for name in sorted(files) if name not in held_out)
    valid = b"".join(files[name] + b"\0" for name in sorted(held_out))
    source = f"{root}, {len(files) - len(held_out)} files, {len(held_out)} more held out"
    return Text(_bytes(train), _bytes(valid), source)


def random_starts(data: Tensor, count: int, seq: int, generator: torch.Generator) -> Tensor:
    """Where `count` random training sequences begin: int64 [count]."""
    return torch.randint(len(data) - seq, (count,), generator=generator)


class Sequences(Dataset):
    """The sequences that text falls into, one after the other, as a dataset.

    Args:
        data: uint8 [bytes], more than `seq`.
        seq: bytes in a sequence.
    """

    def __init__(self, data: Tensor, seq: int) -> None:
        self._data, self._seq = data, seq

    def __len__(self) -> int:
        return (len(self._data) - 1) // self._seq

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and the bytes that follow them: two int64 [seq]."""
        window = self._data[index * self._seq : (index + 1) * self._seq + 1].long()
        return window[:-1], window[1:]


def even_starts(data: Tensor, count: int, seq: int) -> Tensor:
    """Where `count` sequences begin that are spread evenly over the data: int64 [count]."""
    return torch.linspace(0, len(data) - seq - 1, count, dtype=torch.float64).long()


def sequences(data: Tensor, starts: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    """Inputs and the bytes that follow them: two int64 [len(starts), seq]."""
    window = data[starts[:, None] + torch.arange(seq + 1)].long()
    return window[:, :-1], window[:, 1:]


def _standard_library() -> tuple[Path, dict[str, bytes]]:
    """The .py sources that every Python brings, without installed packages and test suites."""
    root = Path(sysconfig.get_path("stdlib"))
    return root, _files(root, "*.py", skip={"site-packages", "dist-packages", "test", "tests"})


def _files(root: Path, pattern: str, skip: frozenset[str] | set[str] = frozenset()):
    """Name below root -> content, of the text files there; hidden and binary ones are left out."""
    files = {}
    for path in root.rglob(pattern):
        parts = path.relative_to(root).parts
        if any(part in skip or part.startswith(".") for part in parts) or not path.is_file():
            continue
        content = path.read_bytes()
        if content and b"\0" not in content:
            files["/".join(parts)] = content
    return files


def _bytes(content: bytes) -> Tensor:
    # bytearray: torch wants memory that it may write to.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0)
