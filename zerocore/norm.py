"""Global gradient norms over shards."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from zerocore import groups, ops, registry
from zerocore.runtime import Sharded


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scales the gradients so that their global norm is at most `max_norm`.

    As torch.nn.utils.clip_grad_norm_ on the unsharded model. A collective over the shard group.

    Args:
        norm_type: 2, 1, any other positive power, or `inf` for the largest magnitude.

    Returns:
        The norm before clipping, a 0-dim fp32 tensor, equal on every rank.

    Raises:
        ValueError: if the model is not sharded, or for a negative `max_norm` or `norm_type`.
        RuntimeError: if gradients wait for their reduction (the last backward was under no_sync).
    """
    models = registry.require_sharded(model, "zerocore.clip_grad_norm_")
    if not max_norm >= 0:
        raise ValueError(f"max_norm: expected a number of at least 0, got {max_norm}")
    if not norm_type > 0:
        raise ValueError(f"norm_type: expected a positive number, got {norm_type}")
    for sharded in models:
        sharded.core.before_step()
    params = [(sharded, p) for sharded in models for p in _params(sharded)]
    norm = grad_norm(params, norm_type)
    scale = clip_coefficient(norm, max_norm)
    grads = [p.grad for _, p in params if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, scale)
    return norm


def grad_norm(
    params: Iterable[tuple[Sharded | None, torch.Tensor]], norm_type: float = 2.0
) -> torch.Tensor:
    """The norm over the whole of all gradients, of which sharded ones are summed over ranks.

    Args:
        params: (sharded model that owns it or None, parameter) pairs.

    Returns:
        A 0-dim fp32 tensor. Sums are taken in fp64, so that their order hardly matters.
    """
    parts: dict[Sharded | None, torch.Tensor] = {}
    largest = math.isinf(norm_type)
    for sharded, param in params:
        if sharded not in parts:
            parts[sharded] = torch.zeros((), dtype=torch.float64)
        part = parts[sharded]
        if param.grad is None or param.grad.numel() == 0:
            continue
        grad = param.grad.detach()
        if largest:
            torch.maximum(part, grad.abs().max().double(), out=part)
        elif norm_type == 2.0:
            part += ops.sumsq(grad)[0]
        else:
            part += grad.double().abs().pow(norm_type).sum()
    for sharded, part in parts.items():
        if sharded is not None:
            groups.reduce_over_shards(part, sharded.groups, maximum=largest)
    values = list(parts.values())
    if largest:
        return torch.stack(values).max().float()
    return torch.stack(values).sum().pow(1.0 / norm_type).float()


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor of torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _params(sharded: Sharded) -> list[nn.Parameter]:
    return [p for unit in sharded.flats for flat in unit for p in flat]
