"""Where ranks part: from what each of them has logged to one sentence. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Step(NamedTuple):
    """A record of a model's log; see zerocore.stats.Record.

    `unit` is None for the whole model. `position` counts the steps that all ranks take in the same
    order since their last recovery from an exception; -1: not one of these. `launch` is the number
    of the launch on a device; -1: of none.
    """

    sequence: int
    event: str
    kind: str
    unit: str | None
    elements: int
    dtype: str
    phase: str
    time: float
    forward: int
    recoveries: int
    position: int
    launch: int = -1


class Raised(NamedTuple):
    """An exception that passed through the modules of a model, or that ended the process."""

    type: str
    text: str
    unit: str | None
    phase: str
    forward: int
    recoveries: int

    def __str__(self) -> str:
        where = f" in {_place(self.phase, self.unit, self.forward)}" if self.phase else ""
        return f"{self.type}: {self.text or '(no text)'}{where}"


@dataclass(frozen=True)
class ModelState:
    """What a rank has done with one model until `now`, in seconds of its log's clock."""

    now: float
    recoveries: int
    steps: list[Step]
    raised: list[Raised] = field(default_factory=list)

    def waits_for(self) -> Step | None:
        """The collective that the rank, or its device, waits for."""
        waiting = None
        launched: dict[tuple[str, str | None], Step] = {}
        for step in self.steps:
            if step.event == "launch":
                launched[step.kind, step.unit] = step
            if step.event == "stall":
                return launched.get((step.kind, step.unit), step)
            if step.event in ("wait", "enter"):
                waiting = step
            elif step.event in ("done", "leave") and waiting and step.kind == waiting.kind:
                waiting = None
            elif step.event == "raise":
                waiting = None
        return waiting

    def computes(self) -> Step | None:
        """The beginning of the innermost unit whose computation is under way."""
        running: list[Step] = []
        for step in self.steps:
            if running and step.recoveries != running[-1].recoveries:
                running = []
            if step.kind not in ("compute", "recompute"):
                continue
            if step.event == "begin":
                running.append(step)
            elif step.event in ("end", "raise"):
                running = [begun for begun in running if begun.unit != step.unit]
        return running[-1] if running and self.recoveries == running[-1].recoveries else None

    def exception(self, recoveries: int) -> str:
        """The exception that the rank went on after, as its `recoveries + 1`st."""
        for raised in self.raised:
            if raised.recoveries == recoveries:
                return str(raised)
        for step in self.steps:
            if step.event == "raise" and step.recoveries == recoveries:
                return f"an exception in {_place(step.phase, step.unit, step.forward)}"
        return "an exception"


@dataclass(frozen=True)
class RankState:
    """A rank's answer.

    `status` is running, ended, crashed or left; in logs, which may end before the rank does, also
    lost (before those of others) or cut (as all do).
    """

    status: str
    models: dict[str, ModelState]
    crash: Raised | None = None

    def to_json(self) -> dict[str, Any]:
        """As what json.dumps takes."""
        models = {
            key: {
                "now": model.now,
                "recoveries": model.recoveries,
                "steps": [list(step) for step in model.steps],
                "raised": [list(raised) for raised in model.raised],
            }
            for key, model in self.models.items()
        }
        crash = list(self.crash) if self.crash else None
        return {"status": self.status, "models": models, "crash": crash}

    @staticmethod
    def from_json(value: dict[str, Any]) -> RankState:
        """The inverse of `to_json`."""
        models = {
            key: ModelState(
                model["now"],
                model["recoveries"],
                [Step(*step) for step in model["steps"]],
                [Raised(*raised) for raised in model["raised"]],
            )
            for key, model in value["models"].items()
        }
        crash = Raised(*value["crash"]) if value["crash"] else None
        return RankState(value["status"], models, crash)


_KINDS = {
    "all_gather": "the all-gather",
    "reduce": "the reduction",
    "full_parameters": "the all-gather of full parameters",
    "agreement": "the agreement at the end of backward",
    "divergence": "the comparison of what ranks did",
    "order": "the agreement on an order of reductions",
    "packing": "the packing of gradients",
    "drain": "its last all-gathers to be read",
}

_STATUS = {
    "ended": "ended the script",
    "crashed": "ended with an exception",
    "left": "destroyed the process group",
}


def is_well(states: Mapping[int, RankState | None]) -> bool:
    """Whether all ranks have ended by themselves, and none waited for another one."""
    return all(
        state is not None
        and state.status in ("ended", "left")
        and not any(model.waits_for() for model in state.models.values())
        for state in states.values()
    )


def first_divergence(
    states: Mapping[int, RankState | None], strangers: frozenset[int] = frozenset()
) -> str:
    """Names the rank, the unit and the phase where ranks part first, and what to do about it.

    Args:
        states: by rank; None for one that does not answer.
        strangers: ranks that have never called zerocore.shard for these ranks.
    """
    for find in (_absent, _gone, _cut, _parted, _idle, _stuck):
        found = find(states, strangers)
        if found is not None:
            return f"zerocore: {found}"
    return "zerocore: a collective failed, but no rank did anything that another did not"


_States = Mapping[int, RankState | None]


def _absent(states: _States, strangers: frozenset[int]) -> str | None:
    silent = [rank for rank, state in states.items() if state is None or state.status == "lost"]
    missing = [rank for rank in silent if rank in strangers]
    waiting = _what_others_wait_for(states, silent)
    crashed = any(state and state.status == "crashed" for state in states.values())
    if crashed and not any(states[rank] is None for rank in silent):
        return None  # the logs that were cut off are the launcher's doing, once one had crashed
    if missing:
        return (
            f"{_ranks(missing)} never called zerocore.shard with these ranks{waiting}; call it on "
            "every rank of the mesh, as often and in the same order"
        )
    if silent:
        last = ""
        if (state := states[silent[0]]) is not None:
            last = f" Its log ends when it {_doing(state)}."
        return (
            f"no answer from {_ranks(silent)}: dead, stopped, or without a turn for threads"
            f"{waiting}; look at what that process, or the kernel about it, has said.{last}"
        )
    return None


def _gone(states: _States, strangers: frozenset[int]) -> str | None:
    gone = {rank: s for rank, s in states.items() if s is not None and s.status in _STATUS}
    for status in ("crashed", "left", "ended"):
        ranks = [rank for rank, state in gone.items() if state.status == status]
        if not ranks:
            continue
        state = gone[ranks[0]]
        why = f", {state.crash}" if state.crash else ""
        last = next((m.raised[-1] for m in state.models.values() if m.raised), None)
        if last is not None and state.crash is None:
            why = f", after {last}"
        elif last is not None and last.type == state.crash.type:
            why = f", {last}"
        before = "" if last is not None else f"; before, it {_doing(state, past=True)}"
        return (
            f"{_ranks(ranks)} {_STATUS[status]}{why}{before}"
            f"{_what_others_wait_for(states, ranks)}; every rank has to take as many steps"
        )
    return None


def _cut(states: _States, strangers: frozenset[int]) -> str | None:
    """Logs that all just end: a rank may have done more, and what it waits for may be there."""
    cut = {rank: state for rank, state in states.items() if state and state.status == "cut"}
    if len(cut) < len(states):
        return None
    for key in dict.fromkeys(key for state in cut.values() for key in state.models):
        models = {rank: s.models[key] for rank, s in cut.items() if key in s.models}
        if len({model.recoveries for model in models.values()}) == 1:
            if (found := _first_difference(models)) is not None:
                return found
    last = "; ".join(f"rank {rank} {_doing(state, past=True)}" for rank, state in cut.items())
    return (
        "no rank has written why it ended: they run still, or were killed, as launchers do with "
        f"all when one is dead: see which one they name. The last that the logs tell: {last}"
    )


def _parted(states: _States, strangers: frozenset[int]) -> str | None:
    """The first position at which ranks did different things."""
    keys = dict.fromkeys(key for state in states.values() if state for key in state.models)
    for key in keys:
        models = {rank: s.models[key] for rank, s in states.items() if s and key in s.models}
        recoveries = {rank: model.recoveries for rank, model in models.items()}
        least = min(recoveries.values())
        ahead = [rank for rank, count in recoveries.items() if count > least]
        if ahead:
            behind = [rank for rank in models if rank not in ahead]
            return (
                f"{_ranks(ahead)} went on after {models[ahead[0]].exception(least)}, which "
                f"{_ranks(behind)} did not see; let it end the process, or catch it on every rank"
            )
        found = _first_difference(models)
        if found is not None:
            return found
    return None


def _first_difference(models: Mapping[int, ModelState]) -> str | None:
    taken = {
        rank: {
            step.position: step
            for step in model.steps
            if step.position >= 0 and step.recoveries == model.recoveries
        }
        for rank, model in models.items()
    }
    for position in sorted(set().union(*taken.values())):
        steps = {rank: own[position] for rank, own in taken.items() if position in own}
        kinds = Counter((s.event, s.kind, s.unit, s.phase) for s in steps.values())
        if len(kinds) < 2:
            continue
        usual = kinds.most_common(1)[0][0]
        others = [r for r, s in steps.items() if (s.event, s.kind, s.unit, s.phase) != usual]
        rest = [rank for rank in steps if rank not in others]
        odd, even = steps[others[0]], steps[rest[0]]
        same = [rank for rank in others if steps[rank][1:4] == odd[1:4]]
        return (
            f"{_ranks(same)} {_takes(odd)}, but {_ranks(rest)} {_takes(even)}: the first step that "
            "differs; every rank has to use the same units and call the same functions, in the "
            "same order"
        )
    return None


def _idle(states: _States, strangers: frozenset[int]) -> str | None:
    """Ranks that do not wait for the others, who wait for them."""
    idle = [
        rank
        for rank, state in states.items()
        if state is not None and not any(m.waits_for() for m in state.models.values())
    ]
    if not idle or len(idle) == len(states):
        return None
    rank = min(idle, key=lambda rank: _progress(states[rank]))
    return (
        f"rank {rank} is alive but does not take part: it {_doing(states[rank])}"
        f"{_what_others_wait_for(states, idle)}; if it may take that long, raise "
        "zerocore.shard(timeout=...)"
    )


def _stuck(states: _States, strangers: frozenset[int]) -> str | None:
    """All wait: for different things, or for messages that do not come."""
    answers = {rank: state for rank, state in states.items() if state is not None}
    if not answers:
        return None
    waits = [f"rank {rank} {_doing(state)}" for rank, state in answers.items()]
    wanted = {
        (step.kind, step.unit, step.phase, step.forward)
        for state in answers.values()
        for model in state.models.values()
        if (step := model.waits_for()) is not None
    }
    if len(wanted) > 1:
        return (
            f"{'; '.join(waits[:8])}: they wait for different things; every rank has to call the "
            "same functions, in the same order"
        )
    return f"{'; '.join(waits[:8])}: no rank is idle and none differs; is the network well?"


def _what_others_wait_for(states: _States, ranks: list[int]) -> str:
    for rank, state in states.items():
        if state is None or rank in ranks:
            continue
        if any(model.waits_for() for model in state.models.values()):
            return f", while rank {rank} {_doing(state)}"
    return ""


def _progress(state: RankState | None) -> tuple[int, int]:
    steps = [step for m in state.models.values() for step in m.steps[-1:]] if state else []
    return max(((step.forward, step.position) for step in steps), default=(0, 0))


def _doing(state: RankState, past: bool = False) -> str:
    """A predicate: what the rank is at, or what it did last."""
    models = [model for model in state.models.values() if model.steps]
    for model in models:
        step = model.waits_for()
        if step is not None:
            seconds = model.now - step.time
            verb = "waited" if past else "waits"
            return f"{verb} for {_collective(step)} ({seconds:.1f} s)"
    if not models:
        return "had taken no step" if past else "has taken no step"
    for model in models:
        step = model.computes()
        if step is not None:
            seconds = model.now - step.time
            verb = "was" if past else "is"
            where = _place(step.phase, step.unit, step.forward)
            return f"{verb} in {where} ({seconds:.1f} s)"
    model = min(models, key=lambda model: model.now - model.steps[-1].time)
    step = model.steps[-1]
    ago = f"{model.now - step.time:.1f} s"
    if step.event == "raise" or (model.raised and model.raised[-1].forward == step.forward):
        return f"had {model.exception(step.recoveries)} ({ago} ago)"
    where = _place(step.phase, None, step.forward)
    if step.kind in ("drain", "optimizer"):
        where = f"the step after forward {step.forward}"
    if step.event in ("done", "leave") and step.kind in ("agreement", "reduce", "order"):
        where = f"the backward of forward {step.forward}"
    did = "had done nothing" if past else "has done nothing"
    return f"{did} for {ago} since {where}"


def _collective(step: Step) -> str:
    name = _KINDS.get(step.kind, step.kind)
    of = f" of {_unit(step.unit)}" if step.unit is not None else ""
    return f"{name}{of} {_in_phase(step.phase, step.forward)}"


def _takes(step: Step) -> str:
    if step.event == "need":
        return f"used {_unit(step.unit)} {_in_phase(step.phase, step.forward)}"
    of = f" of {_unit(step.unit)}" if step.unit is not None else ""
    name = _KINDS.get(step.kind, step.kind)
    return f"came to {name}{of} {_in_phase(step.phase, step.forward)}"


def _unit(unit: str | None) -> str:
    return f"unit {unit!r}" if unit else "the root unit"


def _in_phase(phase: str, forward: int) -> str:
    if phase == "idle":
        return f"after forward {forward}" if forward else "before the first forward"
    return f"in {_place(phase, None, forward)}"


def _place(phase: str, unit: str | None, forward: int) -> str:
    of = f" of {_unit(unit)}" if unit is not None else ""
    if phase == "forward":
        return f"the forward{of} (forward {forward})" if of else f"forward {forward}"
    if phase == "backward":
        return (
            f"the backward{of} (of forward {forward})"
            if of
            else f"the backward of forward {forward}"
        )
    return f"the code after forward {forward}" if forward else "the code before the first forward"


def _ranks(ranks: list[int]) -> str:
    """'rank 1', or 'ranks 1, 2, 3'."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{', ...' if len(ranks) > 8 else ''}"
