"""What a rank sends in a step, by formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zerocore.planner.schedule import Schedule
from zerocore.planner.setting import FlatFacts, Setting
from zerocore.planner.sizes import ModelSizes


class Collectives(NamedTuple):
    """Collectives of one kind."""

    calls: int
    elements: int  # sent by this rank
    bytes: int  # sent by this rank


def sent(sizes: ModelSizes, setting: Setting, schedule: Schedule) -> dict[str, Collectives]:
    """By kind, as `zerocore.stats(model).collectives` counts a step that is not the first.

    Over n ranks a gather or a reduce-scatter sends (n-1)/n of the buffer, an all-reduce twice that.
    A step of stage 0 all-reduces: 2 P for P parameters. Stages 1 and 2 reduce-scatter and gather: 2
    P as well, for one micro-batch. Stage 3 gathers again for the backward what was released after
    the forward: up to 3 P (arXiv 1910.02054, section 7).
    """
    total: dict[str, Collectives] = {}

    def add(kind: str, elements: int, width: int, times: int) -> None:
        calls, before, size = total.get(kind, (0, 0, 0))
        total[kind] = Collectives(
            calls + times, before + times * elements, size + times * elements * width
        )

    for unit, times in schedule.times("gather").items():
        for facts in gathered(sizes, setting, unit):
            add("all_gather", facts.shard * (setting.shards - 1), facts.compute.itemsize, times)
    for unit, times in schedule.times("reduce").items():
        for facts in reduced(sizes, setting, unit):
            width = facts.transport.itemsize
            if setting.shards > 1:
                add("reduce_scatter", facts.shard * (setting.shards - 1), width, times)
            if setting.replicas > 1:
                part = facts.shard // setting.replicas
                add("all_reduce", 2 * part * (setting.replicas - 1), width, times)
    backwards = max(schedule.times("reduce").values(), default=0)
    if setting.ranks > 1 and backwards:
        add("control", agreement_bytes(sizes), 1, backwards)
    return total


def gathered(sizes: ModelSizes, setting: Setting, unit: int) -> Sequence[FlatFacts]:
    """The flat buffers of a unit that a gather of it sends: resident frozen ones never change."""
    stay = setting.lifetimes.full_parameters_stay
    return [
        FlatFacts.of(flat, setting)
        for flat in sizes.units[unit].flats
        if flat.trainable or not stay
    ]


def reduced(sizes: ModelSizes, setting: Setting, unit: int) -> Sequence[FlatFacts]:
    """The flat buffers of a unit whose gradients are reduced."""
    return [FlatFacts.of(flat, setting) for flat in sizes.units[unit].flats if flat.trainable]


def agreement_bytes(sizes: ModelSizes) -> int:
    """What ranks tell each other at the end of a backward: see Runtime::agreement_bytes."""
    parameters = sum(len(flat.numels) for unit in sizes.units for flat in unit.flats)
    return 16 + len(sizes.units) + parameters
