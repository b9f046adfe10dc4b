"""The rows that all benchmarks print, and the lines that say where they were measured."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
from collections.abc import Callable

import torch

from zerocore import _C


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure that was measured, and what is wanted of it."""

    what: str  # what was measured, over what
    value: float
    unit: str  # "x" for a ratio, else "us", "s", "MB", ...
    wanted: float | None = None  # the limit; None: for information
    at_most: bool = True  # whether the limit is an upper one
    detail: str = ""  # the figures behind it

    @property
    def reached(self) -> bool:
        """Whether the value keeps to its limit."""
        if self.wanted is None:
            return True
        return self.value <= self.wanted if self.at_most else self.value >= self.wanted

    def line(self, width: int) -> str:
        """A line of the table."""
        limit = ""
        if self.wanted is not None:
            limit = f"{'<=' if self.at_most else '>='} {self.wanted:g}"
        mark = "" if self.reached else "NOT REACHED"
        text = f"{self.what:{width}} {self.value:10.3f} {self.unit:3} {limit:10} {mark:11} "
        return (text + self.detail).rstrip()


def print_table(rows: list[Row]) -> None:
    """Prints the rows, and how many of those with a limit keep to it."""
    width = max(len(row.what) for row in rows)
    for row in rows:
        print(row.line(width))
    wanted = [row for row in rows if row.wanted is not None]
    if wanted:
        print(f"{sum(row.reached for row in wanted)} of {len(wanted)} limits are kept")


def where() -> str:
    """Date, versions, machine and command, in two lines."""
    versions = [f"torch {torch.__version__}", f"python {platform.python_version()}"]
    for name in ("deepspeed",):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    machine = f"{_processor()}, {os.cpu_count()} cores, {_C.isa()}, {platform.system()}"
    command = " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    return f"{datetime.date.today()}  {', '.join(versions)}; {machine}\n$ {command}"


def _processor() -> str:
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def main(
    text: str,
    measure: Callable[[argparse.Namespace], list[Row]],
    options: Callable[[argparse.ArgumentParser], None] = lambda _: None,
) -> None:
    """The command line of one benchmark: measures and prints its table.

    Args:
        text: what the benchmark is, for --help.
        measure: makes the rows.
        options: adds options of its own to --quick and --json.
    """
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=text, formatter_class=layout)
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the rows as JSON")
    options(parser)
    chosen = parser.parse_args()
    print(where(), flush=True)
    rows = measure(chosen)
    print_table(rows)
    if chosen.json:
        chosen.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
