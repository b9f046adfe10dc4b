"""Training without zerocore, and how its results are compared with what sharded ranks report."""

from __future__ import annotations

from typing import Any, NamedTuple

import models
import torch
from torch import Tensor, nn

# Large enough that Adam does not turn the rounding noise of gradients that are zero in exact
# arithmetic (the bias of attention keys) into full steps: no two summation orders agree on those.
EPS = 1e-3
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=EPS, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.01),
}


class Trained(NamedTuple):
    """What training ends with: full tensors by name."""

    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor | None]  # averaged over the ranks, by "step name", in memory order


class Piece(NamedTuple):
    """A rank's part of a parameter's gradient: elements [start, stop) in memory order."""

    start: int
    stop: int
    gradient: Tensor | None


def clones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies that later steps leave alone."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """The elements of `tensor` as 1-D, in the order in which `like` has them in memory.

    Row-major if `like` is not dense.
    """
    dims = sorted(range(like.dim()), key=lambda d: -like.stride(d))
    if like.permute(dims).is_contiguous():
        tensor = tensor.permute(dims)
    return tensor.reshape(-1)


def plain(
    job: str, optimizer: str, size: int, steps: int = 5, dtype: torch.dtype | None = None
) -> Trained:
    """Trains in this process on the parts of all ranks; dtype None: as the model is built."""
    model = models.build(job)
    if dtype is not None:
        model.to(dtype)
    opt = OPTIMIZERS[optimizer](model.parameters())
    gradients = {}
    for step in range(steps):
        opt.zero_grad()
        for rank in range(size):
            part = models.batch(job, rank, step, dtype or torch.float32)
            (models.loss_of(model, part) / size).backward()
        gradients |= {f"{step} {name}": g for name, g in named_gradients(model).items()}
        opt.step()
    return Trained(clones(dict(model.named_parameters(remove_duplicate=False))), gradients)


def named_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients of a plain model in memory order."""
    return {
        name: None if p.grad is None else memory_order(p.grad, p).clone()
        for name, p in model.named_parameters()
    }


def assembled(pieces: list[dict[str, Piece]]) -> dict[str, Tensor | None]:
    """Full gradients from all ranks' pieces, which leave no holes and agree where they meet."""
    full: dict[str, Any] = {}
    for name in pieces[0]:
        parts = [rank[name] for rank in pieces]
        missing = {p.gradient is None for p in parts if p.stop > p.start}
        assert len(missing) <= 1, f"gradient of {name} is None on some ranks only: {parts}"
        if missing == {True}:
            full[name] = None
            continue
        flat: dict[int, Any] = {}
        for start, stop, gradient in (p for p in parts if p.stop > p.start):
            assert gradient.shape == (stop - start,), (
                f"{name}: {gradient.shape} for [{start}, {stop})"
            )
            for place, value in zip(range(start, stop), gradient, strict=True):
                held = flat.setdefault(place, value)
                assert held.equal(value) or held.isnan(), f"{name}[{place}] differs between ranks"
        assert sorted(flat) == list(range(len(flat))), f"{name} has holes: {sorted(flat)}"
        empty = next((p.gradient for p in parts if p.gradient is not None), torch.empty(0))[:0]
        full[name] = torch.stack([flat[i] for i in range(len(flat))]) if flat else empty
    return full


def assert_same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    """The same names in the same order, dtypes and bits."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        if tensor is None or found[name] is None:
            assert found[name] is tensor, f"{name}: expected {tensor}, got {found[name]}"
            continue
        assert found[name].dtype == tensor.dtype, f"{name}: {found[name].dtype}, not {tensor.dtype}"
        assert found[name].shape == tensor.shape, f"{name}: {found[name].shape}, not {tensor.shape}"
        wrong = (found[name] != tensor).sum().item()
        assert torch.equal(found[name], tensor), (
            f"{name}: {wrong} of {tensor.numel()} elements differ"
        )


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[torch.dtype, float]:
    """L2 distance from the float64 tensors, over all tensors of a dtype."""
    squares: dict[torch.dtype, float] = {}
    for name, tensor in exact.items():
        if tensor is not None and tensor.is_floating_point():
            square = (found[name].double() - tensor).square().sum().item()
            squares[found[name].dtype] = squares.get(found[name].dtype, 0.0) + square
    return {dtype: square**0.5 for dtype, square in squares.items()}


def assert_as_exact(found: dict, ours: dict, exact: dict, factor: float = 2.0) -> None:
    """The error of `found` against `exact` is at most `factor` times that of plain PyTorch."""
    allowed = errors(ours, exact)
    for dtype, error in errors(found, exact).items():
        assert error <= factor * allowed[dtype], (
            f"{dtype}: error {error:.3g}, more than {factor} times plain's {allowed[dtype]:.3g}"
        )
