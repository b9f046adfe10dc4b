"""The stage that `zerocore.shard(model, stage="auto")` takes."""

from __future__ import annotations

import os
import socket
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from zerocore import _C
from zerocore.agreement import gather_objects
from zerocore.backend import Backend
from zerocore.groups import Ranks
from zerocore.journal import Journal
from zerocore.planner.advice import Workload, candidates, leaves_room
from zerocore.planner.live import setting_for
from zerocore.planner.sizes import ModelSizes
from zerocore.runtime import Options
from zerocore.values import origin_of

AUTO = "auto"


def choose_stage(
    model: nn.Module,
    sizes: ModelSizes,
    options: Options,
    ranks: Ranks,
    place: Backend,
    host: _C.Control,
    journal: Journal,
) -> tuple[int, str]:
    """The lowest stage whose state leaves room for activations, and why; a collective.

    State is parameters, gradients, two moments a parameter and what is on its way; it may take half
    of the memory that is free on the rank that has least, since nothing is known of activations.
    """
    device = place.device
    mine = socket.gethostname(), free_bytes(device), _bytes_on(model, device)
    everyone = gather_objects("zerocore.shard", host, journal, mine)
    least = min(_share(facts, everyone, device) for facts in everyone)
    base = setting_for(options, ranks, device, place.name)
    work = Workload(sizes, base, memory=least)
    found = candidates(work, search=False)
    chosen = next((candidate for candidate in found if leaves_room(work, candidate)), found[-1])
    if chosen.bytes > least and journal.circle.ranks[0] == dist.get_rank():
        warnings.warn(
            f"zerocore.shard(stage='auto'): {chosen} needs {chosen.bytes / 1e9:.3f} GB without "
            f"activations, and {least / 1e9:.3f} GB are free on the rank that has least",
            stacklevel=3,
        )
    needs = f"needs {chosen.bytes / 1e9:.3f} GB, messages included, of {least / 1e9:.3f} GB free"
    lower = [str(c.setting.stage) for c in found if c.setting.stage < chosen.setting.stage]
    reason = f"auto: {needs}, beside activations"
    if lower:
        reason += f"; stage {lower[-1]} would take more than half of it"
    return chosen.setting.stage, reason


def _share(facts: tuple[str, int, int], everyone: list, device: torch.device) -> float:
    """Bytes for one rank: a host's memory is shared by its ranks, a device's is one's own.

    What the model has there already is part of its state.
    """
    name, free, own = facts
    if device.type != "cpu":
        return free + own
    together = Counter(host for host, *_ in everyone)[name]
    return free / together + own


def _bytes_on(model: nn.Module, device: torch.device) -> int:
    """Parameters that have memory on that device."""
    return sum(
        param.untyped_storage().nbytes()
        for param in model.parameters()
        if param.device.type == device.type and origin_of(param) == "in memory"
    )


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had: of a device, or of this host or container."""
    if device.type != "cpu":
        memory = torch.accelerator
        kept = memory.memory_reserved(device) - memory.memory_allocated(device)
        return torch.get_device_module(device).mem_get_info()[0] + kept
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    info = Path("/proc/meminfo")
    if info.exists():
        facts = dict(line.split(":") for line in info.read_text().splitlines())
        free = 1024 * int(facts["MemAvailable"].split()[0])
    limit, used = (Path("/sys/fs/cgroup", f"memory.{name}") for name in ("max", "current"))
    if limit.exists() and (most := limit.read_text().strip()).isdecimal():
        free = min(free, int(most) - int(used.read_text()))
    return free
