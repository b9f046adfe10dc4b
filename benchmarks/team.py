"""The ranks of one system, as processes that wait for commands."""

from __future__ import annotations

import os
import pathlib
import tempfile
import time
from multiprocessing.connection import wait
from typing import Any

import torch.multiprocessing
from member import serve
from systems import RANKS, System

PATIENCE = 120.0  # seconds for one command; gloo gives up before
PRELOADED = ["torch.distributed.fsdp", "torch.distributed.optim", "zerocore"]
SHOWN = 30  # lines of what a rank that died has printed


class Team:
    """Processes that train one system. They rest, without using the CPU, until they are asked.

    A team whose ranks die or do not answer ends the program with what they have printed.
    """

    def __init__(self, system: System) -> None:
        self.system = system
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        os.environ["OMP_NUM_THREADS"] = "1"  # the ranks inherit it
        # Ranks are forks of a process that has imported these, and has done nothing else.
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            arguments = (system, rank, self._folder.name, theirs)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that the pipe ends with the process
            self._pipes.append(ours)
            self._processes.append(process)

    def wait_built(self) -> None:
        """Waits until the model stands."""
        self._answers(range(RANKS), "build")

    def ask(self, command: str, *arguments: Any, ranks: range = range(RANKS)) -> list[Any]:
        """Has ranks run a method of `Member`; their answers."""
        for rank in ranks:
            try:
                self._pipes[rank].send((command, arguments))
            except OSError:
                self._give_up(command, f"rank {rank} has ended")
        return self._answers(ranks, command)

    def _answers(self, ranks: range, command: str) -> list[Any]:
        end = time.monotonic() + PATIENCE
        answers: dict[int, Any] = {}
        while len(answers) < len(ranks):
            missing = {self._pipes[rank]: rank for rank in ranks if rank not in answers}
            ready = wait(list(missing), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                self._give_up(command, f"no answer in {PATIENCE:.0f} s")
            for pipe in ready:
                try:
                    answers[missing[pipe]] = pipe.recv()
                except (EOFError, OSError):
                    self._give_up(command, f"rank {missing[pipe]} has ended")
        return [answers[rank] for rank in ranks]

    def _give_up(self, command: str, reason: str) -> None:
        for process in self._processes:
            process.join(2)  # the others notice, and say so
        lines = [f"{self.system}: expected its ranks to {command}, got: {reason}"]
        for rank, process in enumerate(self._processes):
            log = pathlib.Path(self._folder.name, f"log{rank}")
            printed = log.read_text(errors="replace").splitlines() if log.exists() else []
            lines += [f"--- rank {rank}, exit status {process.exitcode}:", *printed[-SHOWN:]]
        raise SystemExit("\n".join(lines))

    def close(self) -> None:
        """Ends the processes, by force if they do not end themselves."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.exitcode is None:
                process.kill()
                process.join()
        self._folder.cleanup()
