"""From the records of a model's log to spans of time. Pure; all times are whole nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zerocore.tracing.spans import Span


class Moment(NamedTuple):
    """A record of a log (see zerocore.stats.Record), in nanoseconds since the trace began.

    Attributes:
        unit: its name; None for the whole model.
        position: the number of a step that all ranks take in the same order; -1: not one of these.
        launch: the number of what was timed on the device; -1: nothing.
        device: when that began and ended there; None if it is not known.
    """

    sequence: int
    event: str
    kind: str
    unit: str | None
    elements: int
    dtype: str
    phase: str
    time: int
    forward: int
    recoveries: int
    position: int
    launch: int = -1
    device: tuple[int, int] | None = None


@dataclass(frozen=True)
class Model:
    """What is known of a sharded model.

    Attributes:
        name: of its module in the traced one; "" if that is the same.
        key: names the model on all ranks.
        window_bytes: of each unit whose windows come and go; empty if they are resident.
        gathers, reduces: whether other ranks have a part in that.
        on_device: whether work is enqueued: what the host sees of collectives is not their time.
    """

    name: str
    key: str
    window_bytes: dict[str, int]
    gathers: bool
    reduces: bool
    on_device: bool


@dataclass
class _Collective:
    """A gather or reduction under way."""

    launched: Moment
    finished: int | None = None


@dataclass
class Found:
    """What a model's records tell.

    Attributes:
        leases: (time, bytes more or less leased).
        lost: records that the log forgot before they were read.
        gaps: (begin, end) of the times when that was so.
    """

    spans: list[Span] = field(default_factory=list)
    leases: list[tuple[int, int]] = field(default_factory=list)
    lost: int = 0
    gaps: list[tuple[int, int]] = field(default_factory=list)


_WAITS = {
    "all_gather": "gather wait",
    "drain": "gather wait",
    "reduce": "reduce wait",
    "packing": "reduce wait",
}
_COLLECTIVES = {"all_gather": "gather", "reduce": "reduction"}


class Reader:
    """Reads a model's moments, in order; `found` has what they tell."""

    def __init__(self, model: Model, first: int) -> None:
        self.model = model
        self.found = Found()
        self._next = first
        self._last: Moment | None = None
        self._open: list[Moment] = []  # begin, wait, enter
        self._collectives: dict[tuple[str, str | None], _Collective] = {}
        self._finished: dict[tuple[str, str | None], int] = {}  # before it was noted as launched
        self._leased: set[str] = set()
        self._first: Moment | None = None  # of the newest forward of the model
        self._root_wait: Moment | None = None
        self._launches: dict[tuple[str, int], tuple[Moment, list[str]]] = {}

    def read(self, moments: Iterable[Moment], end: int) -> Found:
        """All of a trace that ends at `end`."""
        for moment in moments:
            if moment.sequence != self._next:
                self._forget(moment)
            if self._last is not None and moment.recoveries != self._last.recoveries:
                self._close(self._last.time, failed=True)
            self._next, self._last = moment.sequence + 1, moment
            if self._first is None or moment.forward != self._first.forward:
                self._first = moment
            if (take := getattr(self, f"_{moment.event}", None)) is not None:
                take(moment)
        self._close(end, unfinished=True)
        for (kind, unit), collective in self._collectives.items():
            self._collected(kind, unit, collective, end, unfinished=True)
        for (kind, number), (launched, units) in self._launches.items():
            name, (begin, stop) = ", ".join(units), launched.device
            args = {"phase": launched.phase, "launch": number}
            self._add(_COLLECTIVES[kind], name, begin, stop, device=True, **args)
        return self.found

    def _add(
        self, kind: str, name: str, begin: int, end: int, device: bool = False, **args: Any
    ) -> None:
        self.found.spans.append(Span(kind, name, begin, max(begin, end), device, args))

    def _name(self, unit: str | None) -> str:
        if unit is None:
            return self.model.name
        return ".".join(filter(None, (self.model.name, unit))) or "root"

    def _forget(self, moment: Moment) -> None:
        """Records are missing before this one: what they ended is not known."""
        self.found.lost += moment.sequence - self._next
        before = self._last.time if self._last is not None else 0
        self.found.gaps.append((before, moment.time))
        self._open.clear()
        self._collectives.clear()
        self._finished.clear()
        for unit in self._leased:
            self.found.leases.append((moment.time, -self.model.window_bytes[unit]))
        self._leased.clear()

    def _close(self, end: int, **args: bool) -> None:
        """Nothing that is open will end by itself."""
        for moment in self._open:
            self._spanned(moment, end, **args)
        self._open.clear()

    def _spanned(self, begun: Moment, end: int, **args: bool) -> None:
        kind = _kind_of(begun)
        if kind is None:
            return
        facts: dict[str, Any] = {"forward": begun.forward, **args}
        name = self._name(begun.unit)
        if begun.event == "enter":
            name = begun.kind if begun.unit is None else name
            place = [self.model.key, begun.recoveries, begun.position]
            facts |= {"what": begun.kind, "place": place}
        if begun.event == "wait":
            name = name or begun.kind
            facts["what"] = begun.kind
        self._add(kind, name, begun.time, end, **facts)

    def _ended(self, event: str, moment: Moment) -> None:
        """The newest that is open and matches has ended."""
        for at in range(len(self._open) - 1, -1, -1):
            begun = self._open[at]
            if (begun.event, begun.kind, begun.unit) == (event, moment.kind, moment.unit):
                del self._open[at]
                self._spanned(begun, moment.time)
                return

    def _begin(self, moment: Moment) -> None:
        if (moment.kind, moment.phase, moment.unit) == ("compute", "forward", ""):
            moment = self._with_its_gather(moment)
        if moment.unit is None:  # one at a time: what raised did not end
            self._open = [b for b in self._open if (b.event, b.kind) != ("begin", moment.kind)]
        self._open.append(moment)
        if moment.device is not None and (kind := _kind_of(moment)) is not None:
            self._add(kind, self._name(moment.unit), *moment.device, device=True)

    _enter = _begin

    def _wait(self, moment: Moment) -> None:
        if (moment.kind, moment.unit) == ("all_gather", ""):
            self._root_wait = moment
        self._begin(moment)

    def _with_its_gather(self, moment: Moment) -> Moment:
        """The forward of the whole model begins with the gather of the root, not behind it."""
        wait = self._root_wait
        if moment.device and wait and wait.device and wait.forward == moment.forward:
            moment = moment._replace(device=(wait.device[0], moment.device[1]))
        return moment._replace(time=self._first.time)

    def _end(self, moment: Moment) -> None:
        self._ended("begin", moment)

    def _leave(self, moment: Moment) -> None:
        self._ended("enter", moment)

    def _launch(self, moment: Moment) -> None:
        key = moment.kind, moment.unit
        before = self._collectives.pop(key, None)
        if before is not None:  # reduced twice in one backward
            self._collected(*key, before, moment.time)
        self._collectives[key] = _Collective(moment, self._finished.pop(key, None))
        if moment.kind == "all_gather":
            self._lease(moment)
        if moment.device is not None:
            _, units = self._launches.setdefault((moment.kind, moment.launch), (moment, []))
            units.append(self._name(moment.unit))

    def _finish(self, moment: Moment) -> None:
        key = moment.kind, moment.unit
        if (collective := self._collectives.get(key)) is not None:
            collective.finished = moment.time
        else:
            self._finished[key] = moment.time

    def _done(self, moment: Moment) -> None:
        self._ended("wait", moment)
        collective = self._collectives.pop((moment.kind, moment.unit), None)
        if collective is not None:
            self._collected(moment.kind, moment.unit, collective, moment.time)

    def _collected(
        self, kind: str, unit: str | None, collective: _Collective, end: int, **args: bool
    ) -> None:
        shared = self.model.gathers if kind == "all_gather" else self.model.reduces
        if not shared or self.model.on_device or kind not in _COLLECTIVES:
            return
        begun = collective.launched
        facts = {"phase": begun.phase, "elements": begun.elements, "dtype": begun.dtype}
        stop = end if collective.finished is None else collective.finished
        self._add(_COLLECTIVES[kind], self._name(unit), begun.time, stop, **facts, **args)

    def _lease(self, moment: Moment) -> None:
        if moment.unit in self.model.window_bytes and moment.unit not in self._leased:
            self._leased.add(moment.unit)
            self.found.leases.append((moment.time, self.model.window_bytes[moment.unit]))

    def _release(self, moment: Moment) -> None:
        if moment.unit in self._leased:
            self._leased.remove(moment.unit)
            self.found.leases.append((moment.time, -self.model.window_bytes[moment.unit]))


def _kind_of(begun: Moment) -> str | None:
    if begun.event == "wait":
        return _WAITS.get(begun.kind)
    if begun.event == "enter":
        return "gather wait" if begun.kind == "full_parameters" else "agreement"
    if begun.kind == "compute":
        return "backward" if begun.phase == "backward" else "forward"
    return begun.kind if begun.kind in ("recompute", "optimizer", "checkpoint") else None
