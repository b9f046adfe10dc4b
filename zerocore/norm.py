"""Global gradient norms over shards."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.utils import clip_grad as torchs

from zerocore import collectives, groups, ops, registry
from zerocore.runtime import Sharded
from zerocore.tensor_parallel import TensorParallel

# The model that owns a gradient, where tensor-parallel ranks have the rest, and this rank's part.
Part = tuple[Sharded | None, TensorParallel | None, torch.Tensor]


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scales the gradients so that their global norm is at most `max_norm`.

    As torch.nn.utils.clip_grad_norm_ on the unsharded model, parameters that are not sharded
    included. A collective over the model's ranks, and over the tensor-parallel ones: an element
    that several of them hold counts once. (In fp64 the last bits of the norm depend on how the
    elements are distributed.)

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
    others = [p for p in model.parameters() if registry.entry_of(p) is None]
    parts += [(None, None, p.grad) for p in others if p.grad is not None]
    caller = "zerocore.clip_grad_norm_"
    norm = grad_norm(caller, parts, models, norm_type).to(_result_dtype(parts))
    grads = [grad for _, _, grad in parts]
    if grads:
        torch._foreach_mul_(grads, clip_coefficient(norm, max_norm))
    return norm


def grad_norm(
    caller: str, parts: Iterable[Part], models: Iterable[Sharded], norm_type: float = 2.0
) -> torch.Tensor:
    """The norm over the whole of all gradients.

    A collective over the ranks of the models, with no synchronisation of the host. Each element is
    counted once, however many ranks hold it; those of no sharded model, as if all did.

    Args:
        caller: what the user called, for errors.
        parts: this rank's gradients.
        models: the sharded models of the parts, in an order that all ranks share.

    Returns:
        A 0-dim fp64 tensor, equal on every rank. Sums are taken in fp64, so that their order hardly
        matters. Not finite if any element on any rank is not.

    Raises:
        ValueError: for models of which none has the ranks of all others.
    """
    maximum = math.isinf(norm_type)
    models = list(models)
    widest = groups.widest(model.groups for model in models) if models else None
    everyone = len(widest.ranks.all) if widest else 1
    # By tensor-parallel ranks, in an order that all ranks share: that of the gradients may differ.
    kinds = [kind for model in models for kind in model.tensor_parallel_groups]
    parts = list(parts)
    device = models[0].device if models else next((g.device for *_, g in parts), None)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    sums = dict.fromkeys([(), *kinds], zero)
    for sharded, how, grad in parts:
        if grad.numel() == 0:
            continue
        value = _measure(grad.detach(), norm_type)
        kind = how.groups if how else ()
        if maximum:
            sums[kind] = torch.maximum(sums[kind], value)
            continue
        holders = len(sharded.groups.ranks.replicate) if sharded else everyone
        sums[kind] = sums[kind] + value / (holders * (how.copies if how else 1))
    total = sums.pop(())
    for kind, value in sums.items():
        value = collectives.reduce_over(value, kind, maximum)
        total = torch.maximum(total, value) if maximum else total + value
    if widest is not None:
        total = collectives.reduce_over_all(caller, total, widest, maximum)
    return total if maximum else total.pow(1.0 / norm_type)


def _result_dtype(parts: list[Part]) -> torch.dtype:
    wide = any(grad.dtype in (torch.float64, torch.complex128) for _, _, grad in parts)
    return torch.float64 if wide else torch.float32


def _measure(grad: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The largest magnitude, or the sum of powers."""
    if math.isinf(norm_type):
        return grad.abs().max().double()
    if norm_type == 2.0:
        return ops.sumsq(grad)[0]
    return grad.double().abs().pow(norm_type).sum()


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
    norm_type = float(norm_type)
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
    if not norm_type > 0:
        raise ValueError(
            f"norm_type: expected a positive number for sharded gradients, got {norm_type}"
        )
    for sharded in models:
        sharded.core.before_step()
    caller = "torch.nn.utils.get_total_norm"
    norm = grad_norm(caller, parts, models, norm_type).to(_result_dtype(parts))
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is {norm.item()}, so it cannot be "
            "clipped; expected finite gradients, or error_if_nonfinite=False"
        )
    return norm
