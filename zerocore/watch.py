"""A thread that tells the other ranks, when a collective has failed, what this one did.

[Note: watch] Ranks that part have no collective left to talk with. So they talk through the store
of their process group, where a word can be left for whoever looks:
    alarm/CIRCLE        the rank whose wait failed first: the judge
    answer/CIRCLE/RANK  what each rank did, given by its watch when it sees the alarm
    final/RANK          the same, left by a rank that ends
    verdict/CIRCLE      the first one written is everybody's
Every watch looks for alarms once a second or more often. A rank that waits in a collective gets the
verdict as its error; one that does not, at its next call.

Where collectives run on a device, the host does not wait in them, but in whatever needs a result.
So every watch looks at the device too: a collective that it does not get past is an alarm. With the
verdict the groups on the device are aborted, which frees the device (NCCL), and with it the host,
whose next call of zerocore raises. If nothing frees it, the process ends with the verdict.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import weakref
from datetime import timedelta
from types import TracebackType
from typing import Any

from zerocore.diagnosis import Raised, RankState, first_divergence
from zerocore.journal import Circle, grace_of
from zerocore.logfile import LogFile

HURRY_SECONDS = 0.05  # between looks at the store while an alarm is on
LOG_SECONDS = 0.1  # between writes to a log: what a process loses of it that is killed


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_installed = False


def _install() -> None:
    """Last words when the interpreter ends, by itself or by an exception; once a process."""
    global _installed
    if _installed:
        return
    _installed = True
    # The thread may not run on into the end of the interpreter.
    atexit.register(lambda: [watch.stop("ended") for watch in list(_watches)])
    before = sys.excepthook

    def crashed(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        text = str(error).strip().splitlines()
        crash = Raised(kind.__name__, text[0][:500] if text else "", None, "", 0, 0)
        for watch in list(_watches):
            watch.stop("crashed", crash)
        before(kind, error, trace)

    sys.excepthook = crashed


class Alarm:
    """An alarm of a circle, as this rank sees it."""

    def __init__(self, judge: int, own: bool) -> None:
        self.judge = judge
        self.own = own
        self.since = time.monotonic()
        self.answered = False
        self.answers: dict[int, RankState] = {}


class Watch:
    """The watch of one process, in one world (the life of a default process group).

    Args:
        store, last_words: two connections to the group's store, for the thread and for the end.
        rank: this rank.
        alive: whether the world still is.
        host: who runs the store, for an error when it is gone.
    """

    def __init__(
        self,
        store: Any,
        last_words: Any,
        rank: int,
        alive: Any,
        host: str,
        log_file: LogFile | None,
    ) -> None:
        self.rank = rank
        self.host = host
        self.circles: dict[tuple[int, ...], Circle] = {}
        self._store = store
        self._last_words = last_words
        self._alive = alive
        self._log_file = log_file
        self._known: set[str] = set()  # circles that the others know this rank is in
        self._alarms: dict[str, Alarm] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._status = "running"
        self._crash: Raised | None = None
        for connection in (store, last_words):
            connection.set_timeout(timedelta(seconds=5))
        _watches.add(self)
        _install()
        self._thread = threading.Thread(target=self._run, name="zerocore watch", daemon=True)
        self._thread.start()

    def circle(self, ranks: tuple[int, ...], timeout: float) -> Circle:
        """That of these ranks (sorted); made when it is first asked for.

        Args:
            timeout: of all models over these ranks, from now on.
        """
        circle = self.circles.get(ranks)
        is_new = circle is None
        if is_new:
            circle = self.circles[ranks] = Circle(ranks, self.explain)
        circle.timeout = timeout
        self._wake.set()
        with contextlib.suppress(Exception):  # the store may be gone
            # A new group would look for ranks that have given up already, for as long as gloo does.
            if is_new and self._last_words.check([f"alarm/{circle.key}"]):
                circle.decided.wait(grace_of(timeout))
        return circle

    def explain(self, circle: Circle, failure: str) -> str:
        """Where the ranks part; waits for their answers, no longer than the grace of the timeout.

        Args:
            failure: what failed on this rank.
        """
        if self._stopped.is_set():
            return failure
        if circle.failure is None:
            circle.failure = failure
        self._wake.set()
        if circle.decided.wait(grace_of(circle.timeout)):
            return circle.verdict
        return self._without_store()

    def stop(self, status: str, crash: Raised | None = None) -> None:
        """Leaves a last word and ends the thread."""
        if self._stopped.is_set():
            return
        self._status, self._crash = status, crash
        self._stopped.set()
        self._wake.set()
        if self._log_file is not None:
            with contextlib.suppress(OSError), self._lock:
                self._log_file.write(self._circles())
                self._log_file.end(status, crash)
        with contextlib.suppress(Exception):  # the store may be gone by now, as it should
            if self.circles:
                self._last_words.set(f"final/{self.rank}", json.dumps(self._state().to_json()))
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def _circles(self) -> list[Circle]:
        return list(self.circles.values())

    def _state(self, only: Circle | None = None) -> RankState:
        models = {
            journal.key: journal.state()
            for circle in ([only] if only else self._circles())
            for journal in list(circle.journals.values())
        }
        return RankState(self._status, models, self._crash)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.wait(self._pause())
            self._wake.clear()
            if self._stopped.is_set():
                return
            if not self._alive():
                self.stop("left")
                return
            if self._log_file is not None:
                with contextlib.suppress(OSError), self._lock:
                    self._log_file.write(self._circles())
            for circle in self._circles():
                if circle.decided.is_set():
                    continue
                try:
                    self._look(circle)
                except Exception:
                    # Whatever it was, a failed collective must not wait for this thread.
                    if circle.failure is not None:
                        self._decide(circle, self._without_store())

    def _pause(self) -> float:
        waiting = [circle for circle in self._circles() if not circle.decided.is_set()]
        if any(circle.key in self._alarms for circle in waiting):
            return HURRY_SECONDS
        longest = 1.0 if self._log_file is None else LOG_SECONDS
        return min([longest, *(circle.timeout / 20 for circle in waiting)])

    def _look(self, circle: Circle) -> None:
        store, key = self._store, circle.key
        if key not in self._known:
            store.set(f"member/{key}/{self.rank}", "")
            self._known.add(key)
        if circle.failure is None:
            circle.failure = circle.stall()
        alarm = self._alarms.get(key)
        if alarm is None:
            if circle.failure is not None:
                judge = int(store.compare_set(f"alarm/{key}", "", str(self.rank)))
            elif store.check([f"alarm/{key}"]):
                judge = int(store.get(f"alarm/{key}"))
            else:
                return
            alarm = self._alarms[key] = Alarm(judge, judge == self.rank)
        if not alarm.answered:
            state = self._state(circle)
            store.set(f"answer/{key}/{self.rank}", json.dumps(state.to_json()))
            alarm.answers[self.rank] = state
            alarm.answered = True
        if store.check([f"verdict/{key}"]):
            self._decide(circle, store.get(f"verdict/{key}").decode())
            return
        grace = grace_of(circle.timeout)
        # If the judge is lost too, the others judge.
        patience = 0.6 * grace if alarm.own else 0.8 * grace
        self._collect(circle, alarm)
        late = time.monotonic() - alarm.since > patience
        if late or (alarm.own and len(alarm.answers) == len(circle.ranks)):
            verdict = self._judge(circle, alarm)
            self._decide(circle, store.compare_set(f"verdict/{key}", "", verdict).decode())

    def _collect(self, circle: Circle, alarm: Alarm) -> None:
        for rank in circle.ranks:
            if rank in alarm.answers:
                continue
            for name in (f"answer/{circle.key}/{rank}", f"final/{rank}"):
                if self._store.check([name]):
                    state = json.loads(self._store.get(name))
                    alarm.answers[rank] = RankState.from_json(state)
                    break

    def _judge(self, circle: Circle, alarm: Alarm) -> str:
        states = {rank: alarm.answers.get(rank) for rank in circle.ranks}
        strangers = [
            rank
            for rank, state in states.items()
            if state is None and not self._store.check([f"member/{circle.key}/{rank}"])
        ]
        return first_divergence(states, frozenset(strangers))

    def _decide(self, circle: Circle, verdict: str) -> None:
        circle.verdict = verdict
        circle.fault.set(verdict)
        circle.decided.set()
        if self._log_file is not None:
            with contextlib.suppress(OSError), self._lock:
                self._log_file.write(self._circles())
                self._log_file.verdict(verdict)
        if any(journal.native_groups for journal in list(circle.journals.values())):
            self._free(circle)

    def _free(self, circle: Circle) -> None:
        """Frees the device from collectives of the circle, or else ends the process."""

        def end_if_stuck() -> None:
            if circle.fault.told or not circle.at_collective():
                return
            sys.stderr.write(f"{circle.verdict}\n(On rank {self.rank}: {circle.failure})\n")
            sys.stderr.flush()
            os._exit(1)

        timer = threading.Timer(grace_of(circle.timeout), end_if_stuck)
        timer.daemon = True
        timer.start()
        circle.end_collectives()

    def _without_store(self) -> str:
        return (
            f"zerocore: {self.host} does not answer: dead or stopped; look at what that process, "
            "or the kernel about it, has said"
        )
