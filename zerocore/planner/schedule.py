"""What a rank does in a step and in which order: computations, gathers, reductions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zerocore import _C
from zerocore.planner.setting import FlatFacts, Setting
from zerocore.planner.sizes import ModelSizes

ROOT = 0


class Call(NamedTuple):
    """A part of a step that computes with one unit's parameters.

    A unit with others inside is called in parts: only the first enters, only the last leaves.
    """

    unit: int
    phase: str  # forward, backward
    enters: bool = True  # its parameters are needed from here on
    leaves: bool = True  # and not any more afterwards
    reduces: bool = False  # all gradients of its parameters are there afterwards


class Action(NamedTuple):
    """Something that the runtime starts, or waits for.

    gather, reduce: a collective of these units goes out, in one launch. wait: for the gather of a
    unit. compute: a call, by its index. release: of a unit's window. step: all reductions are
    waited for, then the optimizer steps.
    """

    kind: str
    units: tuple[int, ...] = ()
    call: int = -1


@dataclass(frozen=True)
class Schedule:
    """A step once the order of units is known (from the second one on).

    Attributes:
        calls: what computes, in order.
        actions: what the runtime does around it.
        windows_peak: most bytes of stage 3's windows at once.
    """

    calls: tuple[Call, ...]
    actions: tuple[Action, ...]
    windows_peak: int

    @property
    def units(self) -> list[int]:
        """All that is gathered, reduced or computed."""
        found = {unit for action in self.actions for unit in action.units}
        return sorted(found.union(call.unit for call in self.calls))

    def times(self, kind: str) -> dict[int, int]:
        """How often each unit is gathered or reduced."""
        counts: dict[int, int] = {}
        for action in self.actions:
            if action.kind == kind:
                for unit in action.units:
                    counts[unit] = counts.get(unit, 0) + 1
        return counts


def default_calls(sizes: ModelSizes) -> list[Call]:
    """Units in the order of registration, the root before and after them; then all backwards.

    A backward ends where nothing that was registered before needs gradients.
    """
    units = range(1, len(sizes.units))
    starts = [unit.first_trained for unit in sizes.units if unit.first_trained is not None]
    first = min(starts, default=0)
    back = [unit for unit in reversed(units) if sizes.units[unit].last >= first]
    return [
        Call(ROOT, "forward", leaves=False),
        *(Call(unit, "forward") for unit in units),
        Call(ROOT, "forward", enters=False),
        Call(ROOT, "backward", leaves=False),
        *(Call(unit, "backward", reduces=True) for unit in back),
        Call(ROOT, "backward", enters=False, reduces=True),
    ]


def rehearse(
    sizes: ModelSizes,
    setting: Setting,
    calls: Iterable[Call] | None = None,
    micro_batches: int = 1,
    reduce_last: bool = False,
) -> Schedule:
    """The step that the runtime's scheduler would make of these sizes.

    Args:
        calls: of one micro-batch; None: `default_calls`.
        reduce_last: only the last micro-batch reduces (`zerocore.no_sync`).
    """
    calls = tuple(default_calls(sizes) if calls is None else calls)
    conductor = _Conductor(sizes, setting, calls)
    # As in the runtime, the first step only learns the order.
    for _ in range(2):
        conductor.begin_step()
        for micro in range(micro_batches):
            conductor.micro_batch(not reduce_last or micro == micro_batches - 1)
        conductor.actions.append(Action("step"))
    peak = 0 if setting.lifetimes.full_parameters_stay else conductor.windows.peak
    return Schedule(calls, tuple(conductor.actions), peak)


class _Conductor:
    """Asks the scheduler what Runtime asks it, in the order of csrc/runtime ([Note: a step])."""

    def __init__(self, sizes: ModelSizes, setting: Setting, calls: Sequence[Call]) -> None:
        self.setting = setting
        self.calls = calls
        facts = [[FlatFacts.of(flat, setting) for flat in unit.flats] for unit in sizes.units]
        self.bytes = [sum(flat.window_bytes for flat in flats) for flats in facts]
        self.flats = [unit.flats for unit in sizes.units]
        self.trained = [any(flat.trainable for flat in unit.flats) for unit in sizes.units]
        self.with_backward = {call.unit for call in calls if call.phase == "backward"}
        self.windows = _C.Rehearsal(
            bytes=self.bytes,
            prefetch=setting.prefetch,
            persistent=setting.lifetimes.full_parameters_stay,
            launch_bytes=setting.launch_bytes,
            budget=0 if setting.lifetimes.full_parameters_stay else setting.max_window_bytes,
        )
        self.actions: list[Action] = []
        self.stale = True
        self.reducing: list[int] = []  # units whose gradients wait for the next launch

    def begin_step(self) -> None:
        self.actions = []
        self.stale = self.setting.shards > 1

    def micro_batch(self, reduces: bool) -> None:
        """A forward and a backward."""
        windows, persistent = self.windows, self.setting.lifetimes.full_parameters_stay
        windows.begin_pass()
        if persistent and self.stale:
            for unit, trained in enumerate(self.trained):
                if trained:
                    windows.invalidate(unit)
        self.stale = False
        if persistent:
            windows.start_all()
        for i, call in enumerate(self.calls):
            if call.enters:
                windows.demand(call.unit)
            self._note_windows()
            self.actions.append(Action("compute", call=i))
            if call.reduces and reduces:
                self._reduce(call.unit)
            if call.unit == ROOT or not call.leaves:
                continue  # the root's window stays for the whole pass
            if call.phase == "backward":
                windows.release(call.unit)
            elif self.setting.reshard_after_forward or call.unit not in self.with_backward:
                windows.keep(call.unit)
        self._launch_reductions()
        windows.end_pass()
        self._note_windows()

    def _reduce(self, unit: int) -> None:
        if self.trained[unit]:
            self.reducing.append(unit)
            if sum(self.bytes[u] for u in self.reducing) >= self.setting.launch_bytes / 4:
                self._launch_reductions()

    def _launch_reductions(self) -> None:
        if self.reducing:
            self.actions.append(Action("reduce", tuple(self.reducing)))
            self.reducing = []

    def _note_windows(self) -> None:
        """Gathers that are started together are one launch; without bytes there is none."""
        together: list[int] | None = None
        depth = 0
        for event, unit in self.windows.take():
            if event == "launch":
                depth += 1
                together = [] if depth == 1 else together
            elif event == "launched":
                depth -= 1
                if depth == 0 and together:
                    self.actions.append(Action("gather", tuple(together)))
            elif self.setting.shards == 1 and event != "release":
                continue
            elif not self.flats[unit]:
                continue
            elif event != "gather":
                self.actions.append(Action(event, (unit,)))
            elif self.setting.launch_bytes:
                together.append(unit)
            else:
                self.actions.append(Action("gather", (unit,)))
