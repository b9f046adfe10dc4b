"""Ranks are killed at random moments, saves included: nothing hangs, and no checkpoint is lost."""

import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

import zerocore

SCRIPT = pathlib.Path(__file__).with_name("interrupted_run.py")
END_SECONDS = 90.0  # after a rank was killed, all others have ended
# How often a run is interrupted. More, for a longer drill: ZEROCORE_KILLS=30.
KILLS = int(os.environ.get("ZEROCORE_KILLS", "3"))
STEPS = 15 * KILLS


class Run:
    """The ranks of one start of the script."""

    def __init__(self, folder, size):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        env = os.environ | {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, [SCRIPT.parents[1], SCRIPT.parent])),
        }
        command = [sys.executable, str(SCRIPT), str(folder), str(STEPS)]
        self.ranks = [
            subprocess.Popen(
                command,
                env=env | {"RANK": str(rank)},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def end(self, seconds):
        """Waits for all; what rank 0 wrote, and the errors of each."""
        deadline = time.monotonic() + seconds
        try:
            written = [
                rank.communicate(timeout=max(0.1, deadline - time.monotonic()))
                for rank in self.ranks
            ]
        except subprocess.TimeoutExpired:
            codes = [rank.poll() for rank in self.ranks]
            pytest.fail(f"ranks went on for {seconds} s: exit statuses {codes}")
        finally:
            for rank in self.ranks:
                rank.kill()
        return written[0][0], [errors for _, errors in written]


def straight_end(folder, size):
    """The last line of a run that nobody interrupts."""
    text, errors = Run(folder, size).end(120)
    assert "ends with" in text, errors
    return re.search("ends with .*", text)[0]


def newest_step(folder):
    """That of the newest complete checkpoint; 0 without one."""
    newest = zerocore.latest(folder)
    return int(newest.name.removeprefix("step-")) if newest is not None else 0


def wait_for_progress(run, folder, before):
    """Until a new checkpoint is there, or a rank has ended."""
    deadline = time.monotonic() + 60
    while newest_step(folder) == before and all(rank.poll() is None for rank in run.ranks):
        assert time.monotonic() < deadline, "no new checkpoint in 60 s"
        time.sleep(0.02)


@pytest.mark.parametrize("size", [2, 3] if KILLS > 3 else [2])
def test_killed_at_random_moments(tmp_path, size):
    expected = straight_end(tmp_path / "straight", size)
    folder = tmp_path / "interrupted"
    draw = random.Random(size)
    slowest = 0.0
    for kill in range(KILLS):
        before = newest_step(folder)
        run = Run(folder, size)
        wait_for_progress(run, folder, before)
        time.sleep(draw.uniform(0, 1.0))
        lost = run.ranks[draw.randrange(size)]
        lost.send_signal(signal.SIGKILL)
        began = time.monotonic()
        text, errors = run.end(END_SECONDS)
        slowest = max(slowest, time.monotonic() - began)
        if "ends with" in text:  # it was too late to interrupt it
            break
        survivors = [e for rank, e in zip(run.ranks, errors, strict=True) if rank is not lost]
        assert all("Error" in e for e in survivors), survivors
        assert newest_step(folder) >= before, f"kill {kill}: the newest checkpoint is gone"
    text, errors = Run(folder, size).end(120)
    assert expected in text, (text, errors)
    print(f"{KILLS} kills of {size} ranks; the slowest end took {slowest:.1f} s")
