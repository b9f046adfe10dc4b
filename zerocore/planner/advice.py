"""Which stage, groups, units and look-ahead to take, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from zerocore.planner.activity import Activity, Cost
from zerocore.planner.machine import Machine
from zerocore.planner.peak import Peak, peak_of
from zerocore.planner.schedule import Call, Schedule, default_calls, rehearse
from zerocore.planner.setting import Setting
from zerocore.planner.simulate import Timeline, default_costs, simulate
from zerocore.planner.sizes import FlatSize, ModelSizes, UnitSize

# A step that is slower by less is as fast: the simplest setting among those is taken.
AS_FAST = 0.02
# Of the memory, what a rank may need besides activations where these are not known.
STATE_SHARE = 0.5


@dataclass(frozen=True)
class Candidate:
    """A way to shard a model, and what it would need.

    Attributes:
        setting: the options.
        merged: blocks of the model in a unit.
        peak: the most that a rank needs at once; without activations where they are not known.
        timeline: of a step; None without a machine.
    """

    setting: Setting
    merged: int
    peak: Peak
    timeline: Timeline | None

    @property
    def bytes(self) -> int:
        """That a rank needs at most."""
        return self.peak.bytes

    @property
    def seconds(self) -> float:
        """Of a step; 0 if it is not known."""
        return self.timeline.seconds if self.timeline else 0.0

    def __str__(self) -> str:
        setting = self.setting
        text = f"stage {setting.stage}"
        if setting.stage and setting.replicas > 1:
            text += f", {setting.replicas} replicas of {setting.shards} ranks"
        if setting.stage == 3:
            text += "" if setting.reshard_after_forward else ", reshard_after_forward=False"
            text += f", prefetch={setting.prefetch}" if setting.prefetch != 1 else ""
            text += f", {self.merged} blocks a unit" if self.merged > 1 else ""
        return text


@dataclass(frozen=True)
class Workload:
    """What is to be planned.

    Attributes:
        sizes: the model's.
        base: the setting of stages above 0 without options: groups, dtypes, launches.
        moments: values that the optimizer keeps for each parameter.
        machine: rates; None: bytes only.
        tokens: of a rank and micro-batch; for a machine, without `activity`.
        activity: what the model was seen to do.
        memory: bytes that a rank has; None: it is not looked at.
        units: names of the classes of units, if they were named.
    """

    sizes: ModelSizes
    base: Setting
    moments: int = 2
    machine: Machine | None = None
    tokens: float = 0.0
    activity: Activity | None = None
    memory: float | None = None
    units: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.base.ranks


def candidates(work: Workload, search: bool = True) -> list[Candidate]:
    """Ways to shard a model: each stage over all ranks; with `search`, hybrid sharding too."""
    found = []
    for setting, merged in _settings(work, search):
        found.append(evaluate(work, setting, merged))
    return found


def evaluate(work: Workload, setting: Setting, merged: int = 1) -> Candidate:
    """What a rank would need and how long a step would take."""
    sizes, activity = merge(work.sizes, work.activity, merged)
    calls = default_calls(sizes) if activity is None else activity.calls
    schedule = rehearse(sizes, setting, calls)
    timeline = None
    if work.machine is not None:
        costs = _costs(work, sizes, schedule, activity)
        timeline = simulate(sizes, setting, schedule, work.machine, costs)
        timeline = replace(timeline, tasks=())  # hundreds of candidates need not keep them
    peak = peak_of(sizes, setting, schedule, activity, work.moments, merged)
    return Candidate(setting, merged, peak, timeline)


def _costs(
    work: Workload, sizes: ModelSizes, schedule: Schedule, activity: Activity | None
) -> Sequence[Cost]:
    if activity is not None:
        return activity.costs
    return default_costs(sizes, schedule, work.tokens)


def _settings(work: Workload, search: bool) -> Iterator[tuple[Setting, int]]:
    """Simple ones first."""
    base, ranks = work.base, work.ranks
    for stage in (0, 1, 2, 3):
        shards = 1 if stage == 0 else base.shards
        plain = replace(base, stage=stage, shards=shards, replicas=ranks // shards)
        yield plain, 1
        if not search:
            continue
        groups = [shards, *(_groups(work) if shards == ranks else ())] if stage else [1]
        for group in groups:
            here = replace(plain, shards=group, replicas=ranks // group)
            for option, merged in _options(here, len(work.sizes.units) - 1):
                if (option, merged) != (plain, 1):
                    yield option, merged


def _groups(work: Workload) -> list[int]:
    """Shard groups for hybrid sharding: a node, and powers of two of nodes."""
    node = work.machine.ranks_per_node if work.machine is not None else 1
    group, found = node, []
    while 1 < group < work.ranks:
        if work.ranks % group == 0:
            found.append(group)
        group *= 2
    return found


def _options(setting: Setting, units: int) -> Iterator[tuple[Setting, int]]:
    if setting.stage < 3:
        yield setting, 1
        return
    for reshard in (True, False):
        for prefetch in (1, 2) if reshard else (1,):
            for merged in (1, 2, 4):
                if merged == 1 or merged < units:
                    yield replace(setting, reshard_after_forward=reshard, prefetch=prefetch), merged


def fits(work: Workload, candidate: Candidate) -> bool:
    """Whether a rank has the memory."""
    return work.memory is None or candidate.bytes <= work.memory


def leaves_room(work: Workload, candidate: Candidate) -> bool:
    """Whether it fits, with half of the memory left for activations where they are not counted."""
    share = STATE_SHARE if work.activity is None else 1.0
    return work.memory is None or candidate.bytes <= share * work.memory


def recommend(work: Workload, found: Iterable[Candidate]) -> Candidate | None:
    """The fastest that leaves room, of several as fast the first, the simplest.

    If none leaves room, the smallest that fits; None: nothing fits.
    """
    found = list(found)
    fitting = [candidate for candidate in found if leaves_room(work, candidate)]
    if not fitting:
        fitting = [candidate for candidate in found if fits(work, candidate)]
        return min(fitting, key=lambda candidate: candidate.bytes, default=None)
    fastest = min(candidate.seconds for candidate in fitting)
    return next(c for c in fitting if c.seconds <= fastest * (1 + AS_FAST))


def merge(
    sizes: ModelSizes, activity: Activity | None, count: int
) -> tuple[ModelSizes, Activity | None]:
    """Neighbouring units joined, `count` at a time."""
    if count == 1:
        return sizes, activity
    root, *units = sizes.units
    chunks = [units[i : i + count] for i in range(0, len(units), count)]
    merged = replace(sizes, units=(root, *map(_joined, chunks)))
    if activity is None:
        return merged, None
    return merged, _merged_activity(activity, count)


def _joined(units: Sequence[UnitSize]) -> UnitSize:
    flats: dict[tuple, list[FlatSize]] = {}
    for unit in units:
        for flat in unit.flats:
            flats.setdefault((flat.dtype, flat.trainable), []).append(flat)
    return UnitSize(
        f"{units[0].name}..{units[-1].name}" if len(units) > 1 else units[0].name,
        tuple(
            FlatSize(
                tuple(n for flat in same for n in flat.numels),
                *key,
            )
            for key, same in flats.items()
        ),
        matrix_elements=sum(unit.matrix_elements for unit in units),
        last=max(unit.last for unit in units),
        first_trained=min(
            (unit.first_trained for unit in units if unit.first_trained is not None), default=None
        ),
    )


def _merged_activity(activity: Activity, count: int) -> Activity:
    """Calls of joined units that follow each other become one."""
    calls: list[Call] = []
    costs: list[Cost] = []
    peaks: list[int] = []
    for call, cost, peak in zip(activity.calls, activity.costs, activity.peaks, strict=True):
        unit = 0 if call.unit == 0 else 1 + (call.unit - 1) // count
        last = calls[-1] if calls else None
        if last is not None and unit and (last.unit, last.phase) == (unit, call.phase):
            calls[-1] = last._replace(leaves=call.leaves, reduces=call.reduces)
            costs[-1] = costs[-1] + cost
            peaks[-1] = max(peaks[-1], peak)
        else:
            calls.append(call._replace(unit=unit))
            costs.append(cost)
            peaks.append(peak)
    return replace(activity, calls=tuple(calls), costs=tuple(costs), peaks=tuple(peaks))
