"""Global gradient norms over shards."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.utils import clip_grad as torchs

from zerocore import groups, ops, registry
from zerocore.groups import Groups
from zerocore.runtime import Sharded
from zerocore.tensor_parallel import TensorParallel

# The model that owns a gradient, where tensor-parallel ranks have the rest, and this rank's part.
Part = tuple[Sharded | None, TensorParallel | None, torch.Tensor]


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scales the gradients so that their global norm is at most `max_norm`.

    As torch.nn.utils.clip_grad_norm_ on the unsharded model. A collective over the shard group, and
    over the tensor-parallel ranks: an element that several of them hold counts once.

    Args:
        norm_type: 2, 1, any other positive power, or `inf` for the largest magnitude.

    Returns:
        The norm before clipping, a 0-dim tensor, equal on every rank; fp32, or fp64 if some
        gradient is.

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
    params = [(s, p) for s in models for p in s.params() if p.grad is not None]
    parts = [(s, registry.entry_of(p).tensor_parallel, p.grad) for s, p in params]
    norm = grad_norm(parts, models, norm_type).to(_result_dtype(parts))
    grads = [grad for _, _, grad in parts]
    if grads:
        torch._foreach_mul_(grads, clip_coefficient(norm, max_norm))
    return norm


def grad_norm(
    parts: Iterable[Part], models: Iterable[Sharded], norm_type: float = 2.0
) -> torch.Tensor:
    """The norm over the whole of all gradients, of which sharded ones are summed over ranks.

    A collective over the ranks of the models, with no synchronisation of the host. Each element is
    counted once: replicas hold the same one.

    Args:
        parts: this rank's gradients.
        models: the sharded models of the parts, in an order that all ranks share.

    Returns:
        A 0-dim fp64 tensor, equal on every rank. Sums are taken in fp64, so that their order hardly
        matters. Not finite if any element on any rank is not.
    """
    maximum = math.isinf(norm_type)
    # By model and tensor-parallel ranks, in an order that all ranks share: that of the gradients
    # may differ between them.
    sums: dict[tuple[Sharded | None, tuple], torch.Tensor] = {(None, ()): _nothing()}
    for sharded in models:
        for ranks in [(), *sharded.tensor_parallel_groups]:
            sums[sharded, ranks] = _nothing()
    for sharded, how, grad in parts:
        if grad.numel() == 0:
            continue
        value = _measure(grad.detach(), norm_type)
        key = (sharded, how.groups if how else ())
        copies = how.copies if how and not maximum else 1
        sums[key] = _join(sums[key], value / copies, maximum)
    total = sums.pop((None, ()))  # of parameters that are no sharded model's: not reduced
    by_model: dict[Sharded, torch.Tensor] = {}
    for (sharded, ranks), value in sums.items():
        value = groups.reduce_over(value, ranks, maximum)
        by_model[sharded] = _join(by_model.get(sharded, _nothing()), value, maximum)
    total = _join(total, _over_ranks(by_model, maximum), maximum)
    return total if maximum else total.pow(1.0 / norm_type)


def _result_dtype(parts: list[Part]) -> torch.dtype:
    wide = any(grad.dtype in (torch.float64, torch.complex128) for _, _, grad in parts)
    return torch.float64 if wide else torch.float32


def _nothing() -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64)


def _measure(grad: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The largest magnitude, or the sum of powers."""
    if math.isinf(norm_type):
        return grad.abs().max().double()
    if norm_type == 2.0:
        return ops.sumsq(grad)[0]
    return grad.double().abs().pow(norm_type).sum()


def _join(a: torch.Tensor, b: torch.Tensor, maximum: bool) -> torch.Tensor:
    return torch.maximum(a, b) if maximum else a + b


def _over_ranks(sums: dict[Sharded, torch.Tensor], maximum: bool) -> torch.Tensor:
    """Joins the values of all ranks: one collective for models over the same ranks."""
    total = _nothing()
    shared: dict[groups.Ranks, tuple[Groups, torch.Tensor]] = {}
    for sharded, value in sums.items():
        known = shared.get(sharded.groups.ranks)
        joined = value if known is None else _join(known[1], value, maximum)
        shared[sharded.groups.ranks] = (sharded.groups, joined)
    for ranks, (its_groups, value) in shared.items():
        shared[ranks] = (its_groups, groups.reduce_over_shards(value, its_groups, maximum))
    if not shared:
        return total
    # Models on some of another model's ranks (experts): their sum is on each of theirs.
    widest = groups.widest(its_groups for its_groups, _ in shared.values())
    inner = [(r, value) for r, (_, value) in shared.items() if set(r.all) != set(widest.ranks.all)]
    for ranks, (_, value) in shared.items():
        if set(ranks.all) == set(widest.ranks.all):
            total = _join(total, value, maximum)
    if inner:
        part = _nothing()
        for ranks, value in inner:
            part = _join(part, value if maximum else value / len(ranks.all), maximum)
        total = _join(total, groups.reduce_over_all(part, widest, maximum), maximum)
    return total


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor of torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


_torchs_norm = torchs._get_total_norm


def install() -> None:
    """Makes torch.nn.utils.clip_grad_norm_ right for sharded gradients.

    It looks its norm up in its module at each call, whose function is replaced by one that counts
    the shards of all ranks. Other gradients go to torch's own.
    """
    if torchs._get_total_norm is _torchs_norm:
        torchs._get_total_norm = _total_norm
        torchs.get_total_norm = nn.utils.get_total_norm = _total_norm


@torch.no_grad()
def _total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """As torch.nn.utils.get_total_norm; gradients of shards are those of all ranks."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    owners = {
        id(p.grad): (s, registry.entry_of(p).tensor_parallel)
        for s in registry.all_sharded()
        for p in s.params()
        if p.grad is not None
    }
    parts = [(*owners.get(id(tensor), (None, None)), tensor) for tensor in tensors]
    owning = {sharded for sharded, _, _ in parts}
    models = [sharded for sharded in registry.all_sharded() if sharded in owning]
    if not models:
        return _torchs_norm(tensors, norm_type, error_if_nonfinite, foreach)
    for sharded in models:
        sharded.core.before_step()
    norm = grad_norm(parts, models, float(norm_type)).to(_result_dtype(parts))
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is {norm.item()}, so it cannot be "
            "clipped; expected finite gradients, or error_if_nonfinite=False"
        )
    return norm
