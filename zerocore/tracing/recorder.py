"""zerocore.trace."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from zerocore import _C, registry
from zerocore.runtime import Sharded
from zerocore.tracing import chrome
from zerocore.tracing.files import TraceFile, file_of
from zerocore.tracing.reader import Found, Model, Moment, Reader
from zerocore.tracing.spans import Trace, levels, steps_of, united
from zerocore.world import default_place, run_name

MOST_UNTIMED = 8192  # records that wait for the device: more than it keeps the times of

_running: Path | None = None


@contextlib.contextmanager
def trace(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    tokens: float | None = None,
    flops: float | None = None,
) -> Iterator[Path]:
    """Records what this rank does with a model, for Perfetto and `python -m zerocore trace`.

    Each rank writes a file in Chrome's trace format when the block is left, also by an exception:
    `path`; of several ranks `out.rank0.json` and so on for "out.json". `trace merge` makes one of
    them, `trace report` says where the time goes. Not a collective: some ranks may do it alone.
    Until the file is written, what was recorded is kept in memory: a few kilobytes for each unit
    and step.

    Lanes: steps; data (from the end of a step to the next forward, with all other code of the
    loop); computations of units: forward, backward, and recompute (a unit, or a module in it,
    called again in a backward by activation checkpointing); what the host waits for;
    gathers; reductions; optimizer; checkpoint (zerocore.save and load, without what they do in the
    background). A step is from the first forward after an optimizer step to the end of the next
    optimizer step. A counter has the bytes of windows (stage 3).

    On the CPU a gather is from its launch to when the host has it: its end is not known before the
    host asks. A reduction ends when it does. On devices what the host sees is not the device's
    time: lanes of the device come from events (as with `Stats.time_launches`, which is off
    afterwards), and its waits are when the computing stream waits for a gather or reduction.
    Entering and leaving waits for the device.

    Args:
        tokens: of this rank in a step, for tokens per second.
        flops: floating-point operations of this rank in a step that the model needs, without those
            of recomputations.

    Yields:
        The path of this rank's file.

    Raises:
        ValueError: for a model that is not sharded, or numbers that are not positive.
        RuntimeError: if another trace is running in this process.
        OSError: if the file cannot be written; known at once.
    """
    global _running
    models = registry.require_sharded(model, "zerocore.trace")
    numbers = {"tokens": _positive("tokens", tokens), "flops": _positive("flops", flops)}
    if _running is not None:
        raise RuntimeError(
            f"zerocore.trace: expected one trace at a time, got a second one inside of that to "
            f"{_running}"
        )
    place = file_of(Path(os.path.abspath(path)), *default_place())
    with TraceFile("zerocore.trace: path", place) as file:
        recorder = _Recorder(model, models, numbers)
        _running = file.path
        error: BaseException | None = None
        try:
            with recorder.hooked():
                yield file.path
        except BaseException as raised:
            error = raised
            raise
        finally:
            _running = None
            _finish(file, recorder, error)


def _positive(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not 0 < value <= sys.float_info.max:
        raise ValueError(f"zerocore.trace: {name}: expected a positive number, got {value!r}")
    return float(value)


def _finish(file: TraceFile, recorder: _Recorder, error: BaseException | None) -> None:
    try:
        file.write(chrome.document([recorder.finish(error)]))
    except Exception as failure:
        if error is None:
            raise
        # That of the block is on its way.
        warnings.warn(f"zerocore.trace: {file.path} was not written: {failure}", stacklevel=5)


class _Records:
    """The records of one model's log since the trace began."""

    def __init__(self, name: str, sharded: Sharded) -> None:
        self.sharded = sharded
        self.log = sharded.groups.journal.log
        self.on_device = sharded.device.type != "cpu"
        before = time.monotonic()
        if self.on_device:
            sharded.core.time_device(True)
            torch.accelerator.synchronize()
        self.device_start = (before + time.monotonic()) / 2
        self.first = self.next = self.log.next
        self._kept: list[tuple] = []
        self._times: dict[int, tuple[float, float]] = {}  # on the device, by sequence number
        self._untimed: list[tuple] = []
        self._missed = 0
        units, core = sharded.units, sharded.core
        sizes = {
            unit: sum(core.window_bytes(i, f) for f in range(len(sharded.flats[i])))
            for i, unit in enumerate(units)
        }
        ranks = sharded.groups.ranks
        self.model = Model(
            name,
            sharded.groups.journal.key,
            {} if sharded.options.lifetimes.full_parameters_stay else sizes,
            gathers=len(ranks.shard) > 1,
            reduces=len(ranks.all) > 1,
            on_device=self.on_device,
        )

    def drain(self) -> None:
        """Takes what is new, before the log forgets it."""
        new = self.log.records(self.next)
        if new:
            self.next = new[-1][0] + 1
            self._kept += new
        if self.on_device:
            self._untimed += [r for r in new if r[1] in ("launch", "begin", "wait") and r[11] >= 0]
            self._untimed = [record for record in self._untimed if not self._timed(record)]
            self._missed += len(self._untimed[:-MOST_UNTIMED])
            del self._untimed[:-MOST_UNTIMED]

    @property
    def untimed(self) -> int:
        """Records whose times on the device are not known."""
        return self._missed + len(self._untimed)

    def _timed(self, record: tuple) -> bool:
        times = self.sharded.core.device_times(record[1], record[11])
        if times is not None:
            self._times[record[0]] = times
        return times is not None

    def found(self, start: float, end: int) -> Found:
        """What they tell; `start` is of time.monotonic()."""
        host, device = self.log.start - start, self.device_start - start
        units = self.sharded.units
        moments = []
        for record in self._kept:
            sequence, event, kind, unit, elements, dtype, phase, seconds, *rest = record
            name = units[unit] if 0 <= unit < len(units) else None
            times = self._times.get(sequence)
            on_device = times and (_nanoseconds(device + times[0]), _nanoseconds(device + times[1]))
            now = _nanoseconds(host + seconds)
            moments.append(
                Moment(sequence, event, kind, name, elements, dtype, phase, now, *rest, on_device)
            )
        return Reader(self.model, self.first).read(moments, end)

    def about(self) -> dict[str, Any]:
        """Facts, the same on all ranks."""
        sharded, core = self.sharded, self.sharded.core
        flats = [(i, f) for i, unit in enumerate(sharded.flats) for f in range(len(unit))]
        return {
            "name": self.model.name,
            "stage": sharded.options.stage,
            "shards": len(sharded.groups.ranks.shard),
            "replicas": len(sharded.groups.ranks.all) // len(sharded.groups.ranks.shard),
            "units": dict(zip(sharded.units, sharded.elements, strict=True)),
            "dtypes": sorted({str(core.compute_dtype(*flat)) for flat in flats}),
            "device": sharded.device.type,
        }


def _recomputation_hooks(sharded: Sharded, unit: int, modules: list[nn.Module]) -> list[Any]:
    """Log the forwards of parts of a unit inside of a backward, if not of the unit as a whole."""
    core, running = sharded.core, []

    def alone() -> bool:
        return not running and torch._C._current_graph_task_id() != -1

    def before(*_: Any) -> None:
        if alone():
            core.begin_span("recompute", unit)

    def after(*_: Any) -> None:
        if alone():
            core.end_span("recompute", unit)

    handles = []
    for module in modules:
        handles += [
            module.register_forward_pre_hook(lambda *_: running.append(unit)),
            module.register_forward_hook(lambda *_: running.clear(), always_call=True),
        ]
    for part in {part for module in modules for part in module.children()}:
        handles += [
            part.register_forward_pre_hook(before),
            part.register_forward_hook(after, always_call=True),
        ]
    return handles


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class _Recorder:
    """Takes the records of models and makes a Trace of them."""

    def __init__(self, model: nn.Module, models: list[Sharded], numbers: dict[str, Any]) -> None:
        roots = {registry.sharded_as(m): (name, m) for name, m in model.named_modules()}
        self._roots = [roots[sharded][1] for sharded in models]
        self._on_device = any(sharded.device.type != "cpu" for sharded in models)
        if self._on_device:
            torch.accelerator.synchronize()  # its clock starts when it is done
        self._start, wall = time.monotonic(), time.time()
        self._records = [_Records(roots[sharded][0], sharded) for sharded in models]
        rank, world = default_place()
        self._about = {
            "rank": rank,
            "world": world,
            "run": run_name(),
            "host": socket.gethostname(),
            "wall_clock": wall,  # in seconds since 1970, at time 0 of this rank
            "models": [records.about() for records in self._records],
            "parameters": sum(sum(sharded.elements) for sharded in models),
            "on_device": self._on_device,
            **numbers,
            "versions": {
                "zerocore": _C.BUILD["version"],
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Inside, records are taken around every forward and after every optimizer step.

        The parts of units tell when they are called in a backward: where activation checkpointing
        is inside of a unit, its own calls do not show it.
        """
        handles = [register_optimizer_step_post_hook(lambda *_: self._drain())]
        for module in self._roots:
            handles += [
                module.register_forward_pre_hook(lambda *_: self._drain()),
                module.register_forward_hook(lambda *_: self._drain(), always_call=True),
            ]
        for records in self._records:
            for unit, modules in enumerate(records.sharded.modules[1:], start=1):
                handles += _recomputation_hooks(records.sharded, unit, [ref() for ref in modules])
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _drain(self) -> None:
        for records in self._records:
            records.drain()

    def finish(self, error: BaseException | None) -> Trace:
        """The trace, after the block has ended, perhaps with an error."""
        end = _nanoseconds(time.monotonic() - self._start)
        if self._on_device and error is None:
            torch.accelerator.synchronize()
        self._drain()
        if self._on_device:
            for records in self._records:
                records.sharded.core.time_device(False)
        found = [records.found(self._start, end) for records in self._records]
        spans = united((span for f in found for span in f.spans), ("optimizer", "checkpoint"))
        gaps = [gap for f in found for gap in f.gaps]
        for device in (False, True):
            spans += steps_of(spans, device, gaps)
        spans.sort(key=lambda span: (span.begin, -span.end))
        leases = [lease for f in found for lease in f.leases]
        about = self._about | {
            "lost_records": sum(f.lost for f in found),
            "untimed_records": sum(records.untimed for records in self._records),
            "error": None if error is None else f"{type(error).__name__}: {error}"[:500],
        }
        return Trace(about, spans, levels(leases))
