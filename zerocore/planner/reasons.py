"""What is recommended, in words, and what the prediction takes for granted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from zerocore.planner.advice import AS_FAST, Candidate, Workload, fits, leaves_room, merge
from zerocore.planner.tables import gigabytes


def recommendation(work: Workload, chosen: Candidate | None, plain: Sequence[Candidate]) -> str:
    """Why this one.

    Args:
        plain: each stage over all ranks, without options.
    """
    if chosen is None:
        least = min(plain, key=lambda candidate: candidate.bytes)
        return (
            f"Nothing fits: {least} needs least, {gigabytes(least.bytes)} GB of "
            f"{gigabytes(work.memory)} GB. Take more ranks, smaller micro-batches, activation "
            "checkpointing, or a narrower dtype."
        )
    lines = [f"Recommended: {chosen}."]
    if not leaves_room(work, chosen):
        left = gigabytes(work.memory - chosen.bytes)
        lines.append(f"It leaves {left} GB for activations, which are not counted here: little.")
    lines += _about_lower(work, chosen, plain)
    lines += _about_others(chosen, plain)
    if chosen.setting.stage and chosen.setting.replicas > 1:
        lines.append(
            f"{chosen.setting.shards} ranks share a copy: what they send stays on faster links, "
            "and only sums of shards cross the network."
        )
    lines.append(f"In the script: zerocore.shard(model, {arguments(work, chosen)})")
    if chosen.setting.stage == 3 and chosen.merged > 1:
        lines.append(
            f"(automatic units, and bucket_bytes so large that {chosen.merged} blocks make one)"
        )
    return "\n".join(lines)


def _about_lower(work: Workload, chosen: Candidate, plain: Sequence[Candidate]) -> Iterator[str]:
    for candidate in plain:
        if candidate.setting.stage >= chosen.setting.stage:
            continue
        if fits(work, candidate) and not leaves_room(work, candidate):
            left = gigabytes(work.memory - candidate.bytes)
            yield f"{_first(candidate)} would leave {left} GB for activations: less than half."
        elif not fits(work, candidate):
            more = gigabytes(candidate.bytes - work.memory)
            yield f"{_first(candidate)} does not fit: {more} GB too much."
        elif chosen.timeline and candidate.seconds > chosen.seconds * (1 + AS_FAST):
            yield f"{_first(candidate)} fits, and its step takes {_slower(candidate, chosen)}."


def _about_others(chosen: Candidate, plain: Sequence[Candidate]) -> Iterator[str]:
    for candidate in plain:
        if candidate.setting.stage <= chosen.setting.stage:
            continue
        less = chosen.bytes - candidate.bytes
        gain = f"{gigabytes(less)} GB less" if less > 0 else "no less memory"
        if chosen.timeline is None:
            yield f"{_first(candidate)} would take {gain}; it is not needed."
        elif candidate.seconds > chosen.seconds * (1 + AS_FAST):
            yield f"{_first(candidate)} would take {gain} and {_slower(candidate, chosen)}."
        else:
            yield f"{_first(candidate)} would take {gain} and about as long."


def _first(candidate: Candidate) -> str:
    text = str(candidate)
    return text[0].upper() + text[1:]


def _slower(candidate: Candidate, chosen: Candidate) -> str:
    ratio = candidate.seconds / chosen.seconds - 1
    more = 1e3 * (candidate.timeline.exposed - chosen.timeline.exposed)
    return f"{ratio:.0%} longer ({more:+,.1f} ms of waits for collectives)"


def arguments(work: Workload, chosen: Candidate) -> str:
    """Of `zerocore.shard`."""
    setting = chosen.setting
    words = [f"stage={setting.stage}"]
    if work.units and chosen.merged == 1:
        words.append(f"units=[{', '.join(work.units)}]")
    if setting.mixed_precision is not None:
        wide = setting.mixed_precision.accumulate == torch.float32
        more = "" if wide else ", accumulate=torch.bfloat16"
        words.append(f"mixed_precision=zerocore.MixedPrecision(torch.bfloat16{more})")
    if setting.stage and setting.replicas > 1:
        shape = f"({setting.replicas}, {setting.shards})"
        words.append(
            f'mesh=init_device_mesh(device, {shape}, mesh_dim_names=("replicate", "shard"))'
        )
    if setting.stage == 3:
        if not setting.reshard_after_forward:
            words.append("reshard_after_forward=False")
        elif setting.prefetch != 1:
            words.append(f"prefetch={setting.prefetch}")
        if chosen.merged > 1:
            joined, _ = merge(work.sizes, None, chosen.merged)
            words.append(f"bucket_bytes={max(unit.bytes for unit in joined.units[1:])}")
    return ", ".join(words)


def assumptions(work: Workload, guessed: bool, flops_known: bool) -> list[str]:
    """What the figures above take for granted."""
    lines = ["GB are 1e9 bytes, of one rank; the third step and later ones, without accumulation"]
    if guessed:
        count = len(work.sizes.units) - 1
        lines.append(
            f"a GPT of {count} equal blocks (width 128 for each block, arXiv 2001.08361), nothing "
            "else; --model gives exact bytes"
        )
    if work.activity is None:
        lines.append("activations are not counted; with --model, --activations counts them")
    else:
        lines.append(
            "activations by one forward and backward on tensors without memory, as on a CPU: what "
            "kernels take inside is not seen, and the allocator's fragmentation neither; the loss "
            "is what the model returns as `loss`, else the mean of what it returns"
        )
    lines.append(
        "units called in the order of registration; all ranks alike; two launches of reductions "
        "under way at a time (more where a CPU rank is later than its peers)"
    )
    if work.machine is None:
        return lines
    machine = work.machine
    lines.append(
        f"rates are achieved ones: {machine.flops:.3g} flop/s a rank, {machine.intra:.3g} bytes/s "
        f"a rank inside a node of {machine.ranks_per_node}, {machine.network:.3g} bytes/s a node, "
        f"{1e6 * machine.latency:.3g} us a step between nodes and "
        f"{1e6 * machine.intra_latency:.3g} us inside (ring collectives)"
    )
    if not flops_known:
        lines.append(
            f"2 flops for each matrix element and token forward, 4 backward, {work.tokens:,.0f} "
            "tokens a rank; attention's products and other operations cost nothing"
        )
    if machine.cores is None:
        lines.append("collectives take nothing from the computation beside them")
    else:
        lines.append(f"the ranks of a node share {machine.cores} cores, messages included")
    return lines
