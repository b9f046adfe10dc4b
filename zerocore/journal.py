"""What this rank did with the models over some ranks, and how their collectives fail."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zerocore import _C
from zerocore.diagnosis import ModelState, Raised, Step

SHOWN_STEPS = 2048  # of a model's log, in an answer to the other ranks
SHOWN_EXCEPTIONS = 16


def grace_of(timeout: float) -> float:
    """Seconds of `timeout` that are kept for finding out where the ranks part."""
    return min(10.0, timeout / 4)


class Circle:
    """Models over the same ranks: they fail together.

    Attributes:
        key: the same on all ranks, and of no other circle.
        ranks: the global ranks, sorted.
        timeout: seconds after which a rank that waits is told why.
        fault: what has ended their communication, if anything.
        journals: of the models that are alive, and the newest ones, by key.
        failure: what failed on this rank first.
        decided: is set when `verdict` is there.
    """

    def __init__(self, ranks: tuple[int, ...], explain: Callable[[Circle, str], str]) -> None:
        self.key = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        self.ranks = ranks
        self.timeout = 0.0
        circle = weakref.ref(self)

        def explained(failure: str) -> str:
            own = circle()
            return explain(own, failure) if own is not None else failure

        self.fault = _C.Fault(explained)
        self.explain = explained
        self.journals: weakref.WeakValueDictionary[str, Journal] = weakref.WeakValueDictionary()
        self.newest: deque[Journal] = deque(maxlen=2)  # a script may let go of its model and end
        self.count = 0
        self.failure: str | None = None
        self.decided = threading.Event()
        self.verdict = ""

    def stall(self) -> str | None:
        """Notes a collective that a device does not get past; what to say of it."""
        limit = self.timeout - grace_of(self.timeout)
        found = (journal.stall(limit) for journal in list(self.journals.values()))
        return next(filter(None, found), None)

    def at_collective(self) -> bool:
        """Whether a device is at a collective."""
        return any(journal.under_way() for journal in list(self.journals.values()))

    def end_collectives(self) -> None:
        """Frees this rank's device from collectives that will not end, where its backend can."""
        groups = {g for journal in list(self.journals.values()) for g in journal.native_groups}
        for group in groups:
            with contextlib.suppress(Exception):  # it may be gone, or have failed by itself
                group.abort()

    def open_journal(self) -> Journal:
        """That of the next model; its number is the same on all ranks."""
        journal = Journal(self, self.count)
        self.journals[journal.key] = journal
        self.newest.append(journal)
        self.count += 1
        return journal


class Journal:
    """One model's log, and the exceptions that passed through its modules.

    Attributes:
        number: of the model among those over the same ranks.
        units: their names, by index.
        native_groups: process groups whose collectives run on a device.
        core: weakly, of the model.
    """

    def __init__(self, circle: Circle, number: int) -> None:
        self.circle = circle
        self.number = number
        self.key = f"{circle.key}/{number}"
        self.log = _C.Log()
        self.units: list[str] = []
        self.native_groups: list[torch.distributed.ProcessGroup] = []
        self.core: Callable[[], Any] = lambda: None
        self.raised: deque[Raised] = deque(maxlen=SHOWN_EXCEPTIONS)
        self.raised_count = 0
        self._last_exception: int | None = None

    @property
    def fault(self) -> _C.Fault:
        """The circle's."""
        return self.circle.fault

    @contextlib.contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Logs something that every rank takes part in.

        Raises:
            torch.distributed.DistBackendError: if it fails: it says where the ranks part. At once,
                if something has failed before.
        """
        self.fault.check()
        self.log.add("enter", what, "idle")
        try:
            yield
        except (RuntimeError, torch.distributed.DistError) as error:
            failure = f"zerocore: {what} failed: {error}"
            if not self.fault.broken:
                self.fault.set(self.circle.explain(failure))
            text = f"{self.fault.text}\n(On this rank: {failure})"
            raise torch.distributed.DistBackendError(text) from error
        self.log.add("leave", what, "idle")

    def under_way(self) -> tuple[int, float] | None:
        """The launch that the device is at, and for how many seconds at least."""
        core = self.core()
        return core.under_way() if core is not None else None

    def stall(self, limit: float) -> str | None:
        """Notes a collective that the device has been at for `limit` seconds; what to say of it."""
        under_way = self.under_way()
        if under_way is None or under_way[1] < limit:
            return None
        launch, seconds = under_way
        records = [r for r in self.log.records() if r[1] == "launch" and r[11] == launch]
        if not records:  # the log has forgotten it
            return f"zerocore: a collective did not end on the device within {seconds:.1f} s"
        kind, unit, phase = (records[-1][i] for i in (2, 3, 6))
        self.log.add("stall", kind, phase, unit)
        name = self.units[unit] or "the root unit"
        return f"zerocore: {kind} of {name} in {phase} did not end on the device in {seconds:.1f} s"

    def saw(self, error: BaseException | None, unit: int, phase: str) -> None:
        """Notes an exception that is on its way through the modules of unit `unit`."""
        if error is None or id(error) == self._last_exception or self.fault.broken:
            return
        self._last_exception = id(error)
        steps = self.log.records(max(0, self.log.next - 1))
        forward = steps[-1][8] if steps else 0
        text = str(error).strip().splitlines()
        name = self.units[unit] if unit < len(self.units) else None
        self.raised_count += 1
        self.raised.append(
            Raised(
                type(error).__name__,
                text[0][:500] if text else "",
                name,
                phase,
                forward,
                self.log.recoveries,
            )
        )

    def raised_since(self, count: int) -> list[Raised]:
        """The exceptions behind the first `count`, as far as they are kept."""
        kept, new = list(self.raised), self.raised_count - count
        return kept[max(0, len(kept) - new) :] if new else []

    def steps(self, start: int) -> list[Step]:
        """The records from sequence number `start` on."""
        return [self._step(record) for record in self.log.records(start)]

    def _step(self, record: tuple) -> Step:
        unit = self.units[record[3]] if 0 <= record[3] < len(self.units) else None
        return Step(*record[:3], unit, *record[4:])

    def state(self) -> ModelState:
        """For the other ranks."""
        steps = self.steps(max(0, self.log.next - SHOWN_STEPS))
        return ModelState(self.log.now, self.log.recoveries, steps, list(self.raised))
