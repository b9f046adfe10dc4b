"""Logs of ranks on disk: one JSON object a line, `rank0.jsonl` and so on in a folder.

A line's `line` says what it is: header, model (a model was sharded), steps (of a model's log),
raised, alive (each second), verdict, end.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zerocore.diagnosis import ModelState, Raised, RankState, Step
from zerocore.journal import Circle, Journal

SILENT_SECONDS = 3.0  # a log that ends so long before the others' was cut off


class LogFile:
    """Appends what this rank does; another thread may be killed at any time, not lines torn.

    Raises:
        OSError: if the folder cannot be written to.
    """

    def __init__(self, folder: str, rank: int, world: int) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._file = open(Path(folder) / f"rank{rank}.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self._next: dict[str, int] = {}
        self._raised: dict[str, int] = {}
        self._alive = 0.0
        self._line(
            "header",
            rank=rank,
            world=world,
            host=socket.gethostname(),
            pid=os.getpid(),
            torch=torch.__version__,
        )
        self._file.flush()

    def _line(self, line: str, **facts: Any) -> None:
        self._file.write(json.dumps({"line": line, "time": time.time(), **facts}) + "\n")

    def write(self, circles: Iterable[Circle]) -> None:
        """What is new, and once a second a sign of life."""
        for circle in circles:
            for journal in list(circle.journals.values()):
                self._write_model(circle, journal)
        if time.time() - self._alive >= 1.0:
            self._alive = time.time()
            self._line("alive")
        self._file.flush()

    def _write_model(self, circle: Circle, journal: Journal) -> None:
        key = journal.key
        if key not in self._next:
            # Before the units have names, all that is logged is of the whole model.
            if not journal.units and journal.log.next == 0:
                return
            self._next[key] = 0
            self._raised[key] = 0
            self._line("model", model=key, ranks=circle.ranks, units=journal.units)
        now, recoveries = journal.log.now, journal.log.recoveries
        steps = journal.steps(self._next[key])
        if steps:
            self._next[key] = steps[-1].sequence + 1
        raised = journal.raised_since(self._raised[key])
        self._raised[key] += len(raised)
        if steps or raised:
            self._line(
                "steps", model=key, now=now, recoveries=recoveries, steps=steps, raised=raised
            )

    def verdict(self, text: str) -> None:
        """What the ranks found to be wrong."""
        self._line("verdict", text=text)
        self._file.flush()

    def end(self, status: str, crash: Raised | None) -> None:
        """The last line."""
        self._line("end", status=status, crash=crash)
        self._file.close()


def read_states(folder: Path) -> dict[int, RankState | None]:
    """What each rank did in the newest run that wrote to the folder; None: there is no log.

    Raises:
        ValueError: if there are no logs in the folder.
    """
    logs: dict[int, list[dict[str, Any]]] = {}
    for path in folder.glob("rank*.jsonl"):
        if match := re.fullmatch(r"rank(\d+)\.jsonl", path.name):
            logs[int(match[1])] = _newest_run(path)
    logs = {rank: lines for rank, lines in logs.items() if lines and lines[0]["line"] == "header"}
    if not logs:
        raise ValueError(f"DIR: expected rank0.jsonl and others in {folder}, got none of them")
    world = max(lines[0]["world"] for lines in logs.values())
    newest = max(lines[-1]["time"] for lines in logs.values())
    states: dict[int, RankState | None] = dict.fromkeys(range(world))
    for rank, lines in logs.items():
        others = [other for r, other in logs.items() if r != rank]
        ended = all(other[-1]["line"] == "end" for other in others) and bool(others)
        states[rank] = _state(lines, newest, ended)
    if all(state is not None and state.status == "running" for state in states.values()) and not (
        any(line["line"] == "verdict" for lines in logs.values() for line in lines)
    ):
        states = {rank: replace(state, status="cut") for rank, state in states.items()}
    return states


def _newest_run(path: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # the last one, of a process that was killed
        if not isinstance(line, dict) or not {"line", "time"} <= line.keys():
            raise ValueError(f"DIR: expected a log of zerocore in {path}, got {text[:80]!r}")
        if line["line"] == "header":
            lines = []
        lines.append(line)
    return lines


def _state(lines: list[dict[str, Any]], newest: float, others_ended: bool) -> RankState:
    models: dict[str, ModelState] = {}
    status, crash, broken = "running", None, False
    # What ranks do after the verdict is its consequence.
    for line in lines:
        if line["line"] == "verdict":
            broken = True
        elif line["line"] == "model":
            models[line["model"]] = ModelState(0.0, 0, [])
        elif line["line"] == "steps" and not broken:
            before = models[line["model"]]
            models[line["model"]] = ModelState(
                line["now"],
                line["recoveries"],
                before.steps + [Step(*step) for step in line["steps"]],
                before.raised + [Raised(*raised) for raised in line["raised"]],
            )
        elif line["line"] == "end" and not broken:
            status = line["status"]
            crash = Raised(*line["crash"]) if line["crash"] else None
    last = lines[-1]
    cut = last["line"] != "end" and (newest - last["time"] > SILENT_SECONDS or others_ended)
    if cut and not broken:
        status = "lost"
    end = next((line["time"] for line in lines if line["line"] == "verdict"), last["time"])
    return RankState(status, {key: _until(m, lines, key, end) for key, m in models.items()}, crash)


def _until(model: ModelState, lines: list[dict[str, Any]], key: str, end: float) -> ModelState:
    """The model with its clock at `end`: lines without new steps were written since."""
    written = [x["time"] for x in lines if x["line"] == "steps" and x["model"] == key]
    written = [moment for moment in written if moment <= end] or [end]
    return ModelState(model.now + end - written[-1], model.recoveries, model.steps, model.raised)
