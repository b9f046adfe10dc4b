"""Pools of long-lived ranks that run case functions.

Starting two ranks costs about three seconds, so a pool is started once per world size and runs
any number of cases. A case is a module-level function; every rank calls it with the same arguments
and sends back what it returns. A rank that raises, dies or hangs fails the case with the report of
every rank, and the pool is replaced: ranks that no longer agree about their collectives cannot be
trusted with the next case.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import io
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

CASE_SECONDS = 90.0  # a case that takes longer is a hang
GRACE_SECONDS = 20.0  # what the other ranks get once one has failed
GROUP_SECONDS = 30.0  # a collective that takes longer raises in its rank, with a traceback


class Outcome(NamedTuple):
    """What one rank made of a case."""

    kind: str  # "returned", "raised", "died" or "hung"
    value: Any  # the result; the traceback; the exit code; the stacks of all threads
    seconds: float = 0.0  # from the start of the case


class RankError(AssertionError):
    """At least one rank did not return from a case."""


@contextlib.contextmanager
def _surroundings(env: dict[str, str]) -> Iterator[None]:
    """Processes that are started inside have these variables (spawn passes them this sys.path)."""
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    with mock.patch.dict(os.environ, env), mock.patch.object(sys, "path", [*paths, *sys.path]):
        yield


def _serve(
    rank: int,
    size: int,
    store: str,
    stacks: str,
    group_seconds: float,
    backend: str,
    prepare: Callable[[], None] | None,
    pipe: Any,
) -> None:
    """The main function of a rank: runs cases until the pipe says None or breaks."""
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    if backend != "gloo":
        torch.accelerator.set_device_index(rank)
    with open(stacks, "w") as stack_file:
        faulthandler.enable(stack_file, all_threads=True)  # a rank that aborts says where it was
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        timeout = datetime.timedelta(seconds=group_seconds)
        dist.init_process_group(backend, f"file://{store}", timeout, size, rank)
        gc.freeze()  # the collection after each case need not walk torch's own objects
        with contextlib.suppress(EOFError):
            while (message := pipe.recv_bytes()) != b"":
                pipe.send_bytes(_answer(message))
        faulthandler.disable()  # before its file is closed
    if dist.is_initialized():
        dist.destroy_process_group()


def _answer(message: bytes) -> bytes:
    """Runs one case; the answer is a pickled Outcome."""
    try:
        case, args, kwargs = pickle.loads(message)
        value = case(*args, **kwargs)
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # what a case enqueued may not fail in the next one
        dist.barrier()  # a case may not leave its ranks out of step
        buffer = io.BytesIO()
        torch.save(value, buffer)  # by value: the memory must outlive the rank
        return pickle.dumps(Outcome("returned", buffer.getvalue()))
    except Exception:
        return pickle.dumps(Outcome("raised", traceback.format_exc()))


class Pool:
    """`size` ranks of a default group; each has the accelerator of its rank, unless that is gloo.

    Args:
        group_seconds: timeout of the default group.
        backend: of the default group.
        env: variables of the ranks, beside those of this process.
        prepare: a module-level function that each rank calls first.
    """

    def __init__(
        self,
        size: int,
        group_seconds: float = GROUP_SECONDS,
        *,
        backend: str = "gloo",
        env: dict[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self.size = size
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        folder = pathlib.Path(self.folder.name)
        context = multiprocessing.get_context("spawn")
        for rank in range(size):
            pipe, far_end = context.Pipe()
            arguments = (rank, size, str(folder / "store"), str(folder / f"stacks{rank}"))
            options = (group_seconds, backend, prepare, far_end)
            process = context.Process(target=_serve, args=(*arguments, *options), daemon=True)
            with _surroundings(env or {}):
                process.start()
            far_end.close()  # so that the death of the rank closes the pipe
            self.pipes.append(pipe)
            self.processes.append(process)

    def run(self, case: Callable, *args: Any, seconds: float = CASE_SECONDS, **kwargs: Any) -> list:
        """Results of the case by rank; RankError with the report of all ranks if one failed."""
        outcomes = self.outcomes(case, *args, seconds=seconds, **kwargs)
        if any(outcome.kind != "returned" for outcome in outcomes):
            lines = []
            for rank, (kind, value, _) in enumerate(outcomes):
                text = "" if kind == "returned" else f"\n{value}"
                if kind == "died":
                    text += f" at\n{self._stacks(rank)}"
                lines.append(f"---- rank {rank} of {self.size} {kind}{text}")
            raise RankError(f"{case.__module__}.{case.__name__} failed\n" + "\n".join(lines))
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, case: Callable, *args: Any, seconds: float = CASE_SECONDS, **kwargs: Any
    ) -> list[Outcome]:
        """What every rank made of the case, failures included."""
        message = pickle.dumps((case, args, kwargs))
        outcomes: dict[int, Outcome] = {}
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send_bytes(message)
            except OSError:
                outcomes[rank] = self._died(rank)
        started = time.monotonic()
        deadline = started + seconds
        while waiting := [p for r, p in enumerate(self.pipes) if r not in outcomes]:
            left = deadline - time.monotonic()
            ready = multiprocessing.connection.wait(waiting, max(0.0, left))
            if not ready:
                break
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    kind, value, _ = pickle.loads(pipe.recv_bytes())
                    if kind == "returned":
                        # This process may have no accelerator.
                        value = torch.load(
                            io.BytesIO(value), map_location="cpu", weights_only=False
                        )
                    outcomes[rank] = Outcome(kind, value, time.monotonic() - started)
                except (EOFError, OSError):
                    outcomes[rank] = self._died(rank)
                if outcomes[rank].kind != "returned":
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        hung = [rank for rank in range(self.size) if rank not in outcomes]
        for rank in hung:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        if hung:
            time.sleep(0.5)  # the time to write the stacks
        for rank in hung:
            outcomes[rank] = Outcome("hung", f"at\n{self._stacks(rank)}")
        return [outcomes[rank] for rank in range(self.size)]

    def _died(self, rank: int) -> Outcome:
        self.processes[rank].join(5)
        return Outcome("died", self.processes[rank].exitcode)

    def _stacks(self, rank: int) -> str:
        stacks = pathlib.Path(self.folder.name) / f"stacks{rank}"
        return stacks.read_text() if stacks.exists() else ""

    def dismiss(self) -> None:
        """Tells the ranks to end."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
            pipe.close()

    def close(self, seconds: float = 10.0) -> list[int | None]:
        """Lets the ranks end by themselves, then kills; exit codes, None for a killed one."""
        self.dismiss()
        deadline = time.monotonic() + seconds
        codes = []
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            codes.append(process.exitcode)
            if process.exitcode is None:
                process.kill()
                process.join()
        self.folder.cleanup()
        return codes


class Ranks:
    """Pools of one kind, one per world size, each made when it is first needed."""

    def __init__(self, **options: Any) -> None:
        self.options = options  # of every Pool
        self.pools: dict[int, Pool] = {}

    def __call__(self, size: int, case: Callable, *args: Any, **kwargs: Any) -> list:
        """Runs `case(*args, **kwargs)` on `size` ranks; the results by rank."""
        pool = self.pools.setdefault(size, None) or Pool(size, **self.options)
        self.pools[size] = pool
        try:
            return pool.run(case, *args, **kwargs)
        except RankError:
            del self.pools[size]
            pool.close(0.0)
            raise

    def close(self) -> None:
        """Ends all ranks."""
        for pool in self.pools.values():
            pool.dismiss()
        for pool in self.pools.values():
            pool.close()
