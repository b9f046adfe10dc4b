"""What is told or summed over all ranks of models, besides what the C++ runtime sends."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from zerocore import _C
from zerocore.agreement import gather_objects
from zerocore.groups import Groups
from zerocore.strides import copy_into


def exchange(
    caller: str, groups: list[Groups], error: Exception | None, values: list[Any]
) -> list[list[tuple[int, Any]]]:
    """(rank, value) of every rank of each of several models. A collective over all of them.

    Args:
        caller: what the user called, for the error.
        groups: the models', one for each of `values`.
        error: what is wrong on this rank, if anything.

    Raises:
        Exception: this rank's `error`.
        ValueError: for another rank's.
    """
    mine = repr(error) if error is not None else None
    answers = []
    for some, value in zip(groups, values, strict=True):
        everyone = gather_objects(caller, some.host, some.journal, (mine, value))
        answers.append(list(zip(some.journal.circle.ranks, everyone, strict=True)))
    if error is not None:
        raise error
    for everyone in answers:
        for rank, (theirs, _) in everyone:
            if theirs is not None:
                raise ValueError(f"{caller} failed on rank {rank}: {theirs}")
    return [[(rank, value) for rank, (_, value) in everyone] for everyone in answers]


def broadcast_from_first(tensors: list[torch.Tensor], groups: Groups) -> None:
    """The lowest rank's values, in place and byte for byte."""
    if groups.control is None:
        return
    with groups.journal.collective("zerocore.shard"):
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            buffer = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            flat = buffer.reshape(-1).view(torch.uint8)
            dist.broadcast(flat, src=min(groups.ranks.all), group=groups.control)
            if buffer.data_ptr() != tensor.data_ptr():
                copy_into(tensor.detach(), buffer)


def reduce_over_all(
    caller: str, value: torch.Tensor, groups: Groups, maximum: bool = False
) -> torch.Tensor:
    """The sum (or maximum) over all ranks of the model.

    Args:
        caller: what the user called, for the error.
        value: a 0-dim floating tensor. NaN and inf of any rank reach all.
    """
    with groups.journal.collective(caller):
        if groups.backend != "gloo":
            return reduce_over(value, (groups.shard, groups.replicate), maximum)
        topic = _C.Topic.maximum if maximum else _C.Topic.sum
        values = torch.cat(groups.host.gather(topic, value.detach().double().reshape(1)))
        return (values.amax() if maximum else values.sum()).to(value.dtype)


def reduce_over(
    value: torch.Tensor, groups: Iterable[dist.ProcessGroup | None], maximum: bool = False
) -> torch.Tensor:
    """The sum (or maximum) over process groups, one after the other; None is a group of one.

    Args:
        value: a floating tensor of any shape. NaN and inf of any rank reach all.
    """
    for group in groups:
        if group is None:
            continue
        if maximum:
            # gloo's maximum forgets the NaN of any rank but the first: it travels as a flag.
            finite = value.nan_to_num(0.0, math.inf, -math.inf)
            pair = torch.stack([finite, value.isnan().to(value)])
            pair = _all_reduce(pair, dist.ReduceOp.MAX, group)
            value = torch.where(pair[1] > 0, math.nan, pair[0])
        else:
            value = _all_reduce(value, dist.ReduceOp.SUM, group)
    return value


def _all_reduce(value: torch.Tensor, op: dist.ReduceOp, group: dist.ProcessGroup) -> torch.Tensor:
    """HCCL reduces no fp64: there it travels in fp32, as what fp32 holds and what it leaves."""
    if value.dtype != torch.float64 or value.device.type != "npu":
        value = value.clone()
        dist.all_reduce(value, op=op, group=group)
        return value
    high = value.float()
    rest = (value - high).nan_to_num(0.0, 0.0, 0.0).float()
    parts = torch.stack([high, rest]) if op == dist.ReduceOp.SUM else high.clone()
    dist.all_reduce(parts, op=op, group=group)
    return parts.double().sum(0) if op == dist.ReduceOp.SUM else parts.double()


def gather_to_first(caller: str, value: Any, groups: Groups) -> list[Any]:
    """The values of all ranks, in their order, on the first one; nothing on others. A collective.

    Over the control group.
    """
    if groups.control is None:
        return [value]
    first = min(groups.ranks.all)
    found = [None] * len(groups.ranks.all) if dist.get_rank() == first else None
    with groups.journal.collective(caller):
        dist.gather_object(value, found, dst=first, group=groups.control)
    return found or []
