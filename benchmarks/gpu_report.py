"""The report of gpu_check.py. Nothing here needs zerocore: that it is missing is a finding."""

import datetime
import re
import time
from collections.abc import Callable
from pathlib import Path


class Dropped(Exception):
    """Something that this machine cannot do."""


class Report:
    """What is printed and written; the file is complete after every part."""

    def __init__(self, folder: Path, device: str, budget: float) -> None:
        slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        self.path = folder / f"{datetime.date.today()}-gpu-{slug}.txt"
        self.failed: list[str] = []
        self.dropped: list[str] = []
        self._lines: list[str] = []
        self._end = time.perf_counter() + budget
        folder.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        """Seconds of the budget."""
        return self._end - time.perf_counter()

    def note(self, text: str) -> None:
        """Into the file."""
        self._lines.append(text)
        self.path.write_text("\n".join([*self._lines, ""]))

    def say(self, text: str) -> None:
        """Into the file and onto the screen."""
        print(text, flush=True)
        self.note(text)

    def check(self, name: str, run: Callable[[], object]) -> object:
        """Runs a check or a part.

        Any error of it is a finding: the report must still be written, with the other parts.

        Returns:
            What it returned; None if it failed or was dropped.
        """
        begin = time.perf_counter()
        try:
            result = run()
        except Dropped as reason:
            self.drop(f"{name}: {reason}")
        except Exception as error:
            text = f"{type(error).__name__}: {error}".strip()
            first, *more = text.splitlines()
            # Of many lines, a compiler's last one tells most.
            self.failed.append(" ... ".join([f"{name}: {first}", *more[-1:]]))
            self.note(f"FAILED {name}\n{text}")
        else:
            found = f": {result}" if isinstance(result, str) else ""
            self.note(f"ok {name} ({time.perf_counter() - begin:.1f} s){found}")
            return result
        return None

    def drop(self, what: str) -> None:
        """Something that was not done, and why."""
        self.dropped.append(what)
