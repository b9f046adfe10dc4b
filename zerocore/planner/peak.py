"""The most memory that a rank needs in a step, and what it is made of."""

from __future__ import annotations

from dataclasses import dataclass

from zerocore.planner.activity import Activity
from zerocore.planner.communication import gathered, reduced
from zerocore.planner.holding import resident
from zerocore.planner.schedule import Schedule
from zerocore.planner.setting import Setting
from zerocore.planner.sizes import ModelSizes

PART_BYTES = 256 * 2**10  # kPartBytes in csrc/runtime/pairwise.cpp


@dataclass(frozen=True)
class Peak:
    """Bytes of a rank where a step needs most.

    Attributes:
        call: index of the call in which that is; -1: not known.
        resident: parameters, master copies, gradients, moments, buffers.
        windows: gathered parameters.
        messages: buffers of reductions under way.
        activations: activations, temporaries, and local gradients before they are reduced.
    """

    call: int
    resident: int
    windows: int
    messages: int
    activations: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.resident + self.windows + self.messages + self.activations


def peak_of(
    sizes: ModelSizes,
    setting: Setting,
    schedule: Schedule,
    activity: Activity | None = None,
    moments: int = 2,
    merged: int = 1,
) -> Peak:
    """The peak of a step that is not the first, of one micro-batch.

    On the CPU the pools keep the memory of windows and messages for the next lease: it counts all
    the time. Elsewhere the device's allocator gets it back. Gradients were cleared, and are free
    until they are made again. Two launches of reductions are under way at a time, one on the
    network and one that is packed ([Note: reductions behind] in csrc/runtime/backward.cpp). CPU
    ranks have more if a peer is late ([Note: patience] in csrc/runtime/pairwise.cpp).

    Args:
        activity: what the model was seen to do; None: activations are left out, and all that is
            temporary is taken to be there at once.
        moments: values that the optimizer keeps for each parameter.
        merged: the activity is that of the parts of a unit, so many of them: their gradients wait
            for the last one's.
    """
    held = list(resident(sizes, setting, moments))
    keeps = setting.keeps
    gradients = sum(h.bytes for h in held if h.category == "gradients")
    fixed = sum(h.bytes for h in held) - gradients
    messages = {u: message_bytes(sizes, setting, u) for u in schedule.times("reduce")}
    window = {u: sum(f.window_bytes for f in gathered(sizes, setting, u)) for u in schedule.units}
    stay = setting.lifetimes.full_parameters_stay
    reductions = [action.units for action in schedule.actions if action.kind == "reduce"]
    pairs = zip([(), *reductions], reductions, strict=False)
    most_messages = max((sum(messages[u] for u in (*a, *b)) for a, b in pairs), default=0)
    local = max(_local_bytes(sizes, setting, unit) for unit in range(len(sizes.units)))
    if activity is None:
        everything = sum(h.bytes for h in held)
        return Peak(-1, everything, schedule.windows_peak, most_messages, local)
    waiting = local * (merged - 1) // merged
    open_now = made = 0
    sent: tuple[int, ...] = ()  # by the last two launches
    newest: tuple[int, ...] = ()
    best = Peak(-1, 0, 0, 0, 0)
    for action in schedule.actions:
        if action.kind == "gather" and not stay:
            open_now += sum(window[unit] for unit in action.units)
        elif action.kind == "release":
            open_now -= sum(window[unit] for unit in action.units)
        elif action.kind == "reduce":
            sent, newest = newest + action.units, action.units
            made += sum(_gradient_bytes(sizes, setting, unit) for unit in action.units)
        elif action.kind == "compute":
            now = Peak(
                action.call,
                fixed + made,
                schedule.windows_peak if keeps else open_now,
                most_messages if keeps else sum(messages[u] for u in sent),
                activity.peaks[action.call] + waiting,
            )
            best = max(best, now, key=lambda peak: peak.bytes)
    return best


def message_bytes(sizes: ModelSizes, setting: Setting, unit: int) -> int:
    """Buffers of a unit's reduction: packed gradients, and room for what CPU ranks read of others.

    Of CPU ranks on other machines all arrives at once; that is left out.
    """
    total = room = 0
    for facts in reduced(sizes, setting, unit):
        width = facts.transport.itemsize
        total += facts.total * width
        if setting.launch_bytes == 0:
            part = facts.shard // setting.replicas
            arrives = max(facts.shard * (setting.shards - 1), part * (setting.replicas - 1))
            room = max(room, min(arrives * width, PART_BYTES))
    return total + room


def _local_bytes(sizes: ModelSizes, setting: Setting, unit: int) -> int:
    """Full gradients of a unit before they are reduced."""
    return sum(f.total * f.compute.itemsize for f in reduced(sizes, setting, unit))


def _gradient_bytes(sizes: ModelSizes, setting: Setting, unit: int) -> int:
    return sum(f.shard * f.accumulate.itemsize for f in reduced(sizes, setting, unit))
