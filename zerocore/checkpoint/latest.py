"""zerocore.latest."""

from __future__ import annotations

import os
from pathlib import Path

from zerocore.checkpoint.directory import complete


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint of `zerocore.save` in a directory; None if there is none.

    Complete: it has its marker, and every file in full size. Not a collective; ranks see the same
    as long as nobody saves there meanwhile.
    """
    found = complete(Path(directory))
    return found[-1][0] if found else None
