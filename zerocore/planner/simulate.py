"""How long a step takes: the schedule on streams, as a simulation of events."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from zerocore.planner.activity import Cost
from zerocore.planner.communication import gathered, reduced
from zerocore.planner.machine import Machine
from zerocore.planner.schedule import Schedule
from zerocore.planner.setting import FlatFacts, Setting
from zerocore.planner.sizes import ModelSizes


@dataclass
class Task:
    """Work on a stream, in the order of its stream.

    Attributes:
        stream: compute, gather, reduce.
        seconds: that it takes alone.
        after: tasks that have to be over before, beside those before it on its stream.
        units: what it is about.
        link: what it sends over, shared with others that do at the same time; empty: nothing.
        begin, end: seconds since the start of the step, once simulated.
    """

    stream: str
    seconds: float
    after: Sequence[Task] = ()
    units: tuple[int, ...] = ()
    name: str = ""
    link: str = ""
    begin: float = 0.0
    end: float | None = None
    left: float = field(default=0.0, repr=False)


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
        seconds: of the step.
        compute: of it, what computing takes by itself.
        communication: what collectives take by themselves.
        tasks: with their times.
    """

    seconds: float
    compute: float
    communication: float
    tasks: tuple[Task, ...]

    @property
    def exposed(self) -> float:
        """Seconds of the step that computing does not explain: waits for collectives."""
        return max(0.0, self.seconds - self.compute)


def default_costs(sizes: ModelSizes, schedule: Schedule, tokens: float) -> list[Cost]:
    """Two flops for each matrix element and token forward, four backward.

    (Kaplan et al. 2020, arXiv 2001.08361, section 2.1: attention's own products are left out.)
    """
    costs = []
    for call in schedule.calls:
        whole = call.unit != 0 or not call.enters or call.phase == "backward"
        # The root's matrices are those of the head: after the units, and before them in backward.
        if call.unit == 0 and call.phase == "backward":
            whole = call.enters
        factor = 2 if call.phase == "forward" else 4
        flops = factor * sizes.units[call.unit].matrix_elements * tokens if whole else 0.0
        costs.append(Cost(flops=flops))
    return costs


def simulate(
    sizes: ModelSizes,
    setting: Setting,
    schedule: Schedule,
    machine: Machine,
    costs: Sequence[Cost],
    micro_batches: int = 1,
) -> Timeline:
    """A step of one rank, all ranks being alike.

    On a device the host is far ahead, and collectives have streams of their own. On CPU ranks the
    thread that computes starts everything, and all that is under way shares the cores.
    """
    builder = _Builder(sizes, setting, machine)
    for action in schedule.actions:
        builder.add(action.kind, action.units, costs[action.call] if action.call >= 0 else None)
    tasks = builder.tasks
    run(tasks, machine)
    share = 1.0
    if machine.cores is not None:
        share = min(1.0, machine.cores / machine.ranks_per_node)
    compute = sum(task.seconds for task in tasks if task.stream == "compute") / share
    communication = sum(task.seconds for task in tasks if task.stream != "compute")
    return Timeline(max(task.end for task in tasks), compute, communication, tuple(tasks))


class _Builder:
    """Turns what the runtime does into tasks with their order."""

    def __init__(self, sizes: ModelSizes, setting: Setting, machine: Machine) -> None:
        self.sizes, self.setting, self.machine = sizes, setting, machine
        self.tasks: list[Task] = []
        self.on_host = machine.cores is not None
        self.gathers: dict[int, Task] = {}
        self.reductions: list[Task] = []
        self.waiting: list[Task] = []  # what the next computation waits for
        self.computed: Task | None = None  # the newest
        self.released: Task | None = None  # the computation before the newest release

    def add(self, kind: str, units: tuple[int, ...], cost: Cost | None) -> None:
        """One action of the schedule."""
        if kind == "gather":
            self._gather(units)
        elif kind == "wait":
            self.waiting.append(self.gathers[units[0]])
        elif kind == "release":
            self.released = self.computed
        elif kind == "compute":
            self._compute(self.machine.compute_seconds(cost), "compute")
        elif kind == "reduce":
            self._reduce(units)
        elif kind == "step":
            self._step()

    def _compute(self, seconds: float, name: str, units: tuple[int, ...] = ()) -> None:
        waiting, self.waiting = self.waiting, []
        self.computed = Task("compute", seconds, waiting, units, name)
        self.tasks.append(self.computed)

    def _gather(self, units: tuple[int, ...]) -> None:
        facts = [f for unit in units for f in gathered(self.sizes, self.setting, unit)]
        size = sum(f.total * f.compute.itemsize for f in facts)
        seconds = self.machine.gather_seconds(size, self.setting.shards)
        before = self.computed if self.on_host else self.released
        task = Task("gather", seconds, [before] if before else [], units, "all_gather")
        task.link = self.machine.link(self.setting.shards)
        self.tasks.append(task)
        self.gathers.update(dict.fromkeys(units, task))

    def _reduce(self, units: tuple[int, ...]) -> None:
        facts = [f for unit in units for f in reduced(self.sizes, self.setting, unit)]
        pack = sum(f.total * (f.compute.itemsize + f.transport.itemsize) for f in facts)
        seconds = self._reduction_seconds(facts)
        pack /= self.machine.memory
        if self.on_host:
            self._compute(pack, "pack", units)  # by the thread that computes
        else:
            seconds += pack
        task = Task("reduce", seconds, [self.computed] if self.computed else [], units, "reduce")
        task.link = self.machine.link(self.setting.ranks)
        self.tasks.append(task)
        self.reductions.append(task)

    def _reduction_seconds(self, facts: Iterable[FlatFacts]) -> float:
        setting, machine = self.setting, self.machine
        size = sums = 0.0
        for f in facts:
            size += f.total * f.transport.itemsize
            sums += f.total * f.transport.itemsize + f.shard * f.accumulate.itemsize
        part = size / setting.shards
        replicas = 2 * machine.gather_seconds(part, setting.replicas, setting.shards)
        seconds = machine.gather_seconds(size, setting.shards) + replicas
        return seconds + (sums / machine.memory if self.on_host else 0.0)

    def _step(self) -> None:
        self.waiting += self.reductions
        self.reductions = []
        moved = 0.0
        for unit in range(len(self.sizes.units)):
            for f in reduced(self.sizes, self.setting, unit):
                slot = 0 if f.shard_is_slot else f.compute.itemsize
                moved += f.shard * (f.accumulate.itemsize + 6 * f.kept.itemsize + slot)
        self._compute(moved / self.machine.memory, "optimizer")


def run(tasks: Sequence[Task], machine: Machine) -> None:
    """Gives every task its times.

    Each stream does one task at a time. Collectives that send over the same links at the same time
    share them. Where cores are shared by more tasks than there are, of all the ranks of a node, all
    get as much of them.
    """
    streams: dict[str, deque[Task]] = {}
    for task in tasks:
        task.left = task.seconds
        task.end = None
        streams.setdefault(task.stream, deque()).append(task)
    now = 0.0
    while any(streams.values()):
        active = [
            queue[0]
            for queue in streams.values()
            if queue and all(other.end is not None for other in queue[0].after)
        ]
        if not active:
            raise RuntimeError("expected tasks that wait for tasks before them, got a circle")
        for task in active:
            if task.left == task.seconds:
                task.begin = now
        rates = _rates(active, machine)
        step = min(task.left / rate for task, rate in zip(active, rates, strict=True))
        now += step
        for task, rate in zip(active, rates, strict=True):
            task.left -= step * rate
            if task.left <= 1e-15:
                task.end = now
                streams[task.stream].popleft()


def _rates(active: Sequence[Task], machine: Machine) -> list[float]:
    """How fast each task goes on, compared with being alone."""
    if machine.cores is not None:
        return [min(1.0, machine.cores / (len(active) * machine.ranks_per_node))] * len(active)
    links = Counter(task.link for task in active)
    return [1 / links[task.link] if task.link else 1.0 for task in active]
