"""One rank of a team: a process that trains as it is told to."""

from __future__ import annotations

import datetime
import itertools
import os
import pathlib
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import heap
import torch
import torch.distributed as dist
from peer_model import Tokens
from systems import RANKS, System, build, import_peer

import zerocore

Message = tuple[str, int, str]  # kind (all_gather, reduce), elements of the whole, dtype in a log
DTYPES = {"Float": torch.float32, "BFloat16": torch.bfloat16}  # by their names in a log


def status_mb(field: str) -> float:
    """VmRSS (resident memory) or VmHWM (its peak) of this process."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError(f"expected a line {field} in /proc/self/status")


class Member:
    """What a team may ask of a rank: every public method is a command."""

    def __init__(self, system: System, rank: int) -> None:
        self._before = status_mb("VmRSS")
        self._allocated = heap.allocated()
        self._model, self._step = build(system)
        self._built = status_mb("VmHWM")
        self._tokens = Tokens(rank, system.batch)

    def losses(self, steps: int) -> list[float]:
        """Trains; the loss of each step, on this rank's tokens."""
        return [self._step(*self._tokens.draw()).item() for _ in range(steps)]

    def seconds(self, steps: int) -> list[float]:
        """Trains; seconds of each step, of the slowest rank: from barrier to barrier.

        Steps are back to back: what one leaves in flight, the next one pays for.
        """
        return self._time(steps, dist.barrier)

    def seconds_of_one(self, steps: int) -> list[float]:
        """The same on a rank whose peers rest."""
        return self._time(steps, lambda: None)

    def _time(self, steps: int, meet: Callable[[], object]) -> list[float]:
        batches = [self._tokens.draw() for _ in range(steps)]
        meet()
        marks = [time.perf_counter()]
        for batch in batches:
            self._step(*batch)
            meet()
            marks.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(marks)]

    def forget_peak(self) -> None:
        """The peak of resident memory counts from now on."""
        pathlib.Path("/proc/self/clear_refs").write_text("5")

    def memory(self) -> tuple[float, float]:
        """MB above what the process held before the model: peak of the steps, of the building."""
        return status_mb("VmHWM") - self._before, self._built - self._before

    def allocated(self, steps: int) -> float:
        """MB that were allocated at the peak of some steps, above what was before the model."""
        with heap.Peak() as peak:
            self.losses(steps)
        return (peak.bytes - self._allocated) / 1e6

    def messages(self) -> list[Message]:
        """What zerocore hands to its process group in a step."""
        stats = zerocore.stats(self._model)
        stats.reset()
        self._step(*self._tokens.draw())
        kinds = ("all_gather", "reduce")
        log = [r for r in stats.log if r.event == "launch" and r.kind in kinds]
        return [(r.kind, r.elements, r.dtype) for r in log]

    def seconds_of(self, messages: list[Message]) -> float:
        """Seconds that bare collectives of these sizes take, one after the other."""
        buffers = {}
        for _, numel, dtype in messages:
            if (numel, dtype) not in buffers:
                whole = torch.ones(numel, dtype=DTYPES[dtype])
                buffers[numel, dtype] = whole, torch.ones(numel // RANKS, dtype=DTYPES[dtype])
        dist.barrier()
        start = time.perf_counter()
        for kind, numel, dtype in messages:
            whole, part = buffers[numel, dtype]
            if kind == "all_gather":
                dist.all_gather_into_tensor(whole, part)
            else:
                dist.reduce_scatter_tensor(part, whole)
        dist.barrier()
        return time.perf_counter() - start


def serve(system: System, rank: int, folder: str, commands: Connection) -> None:
    """Does what comes down the pipe until it closes. What is printed goes to a file."""
    log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout, RANKS, rank)
    import_peer(system)
    member = Member(system, rank)
    commands.send(None)
    while True:
        try:
            command, arguments = commands.recv()
        except EOFError:
            break
        commands.send(getattr(member, command)(*arguments))
    dist.destroy_process_group()
