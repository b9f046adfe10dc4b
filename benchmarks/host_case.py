"""The model of bench_host.py, as each system shards it, and how it is timed."""

from __future__ import annotations

import copy
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

import zerocore

UNITS, PARAMS, WIDTH = 48, 10, 8

Seconds = dict[str, list[float]]


class Unit(nn.Module):
    """Linear layers with a bias, the last one without if `params` is odd."""

    def __init__(self, params: int) -> None:
        super().__init__()
        biases = [True] * (params // 2) + [False] * (params % 2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=bias) for bias in biases)

    def forward(self, x: Tensor) -> Tensor:
        """X [1, WIDTH] -> the same."""
        for layer in self.layers:
            x = layer(x)
        return x


class Even(Unit):
    """Ten weights of 2^14 elements in all: up to 1,024 ranks need no padding for them."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        widths = (8, *(192, 8) * 4, 256, 8)
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairs)


class Model(nn.Module):
    """Units, and a layer that the root keeps."""

    def __init__(self, units: int = UNITS, params: int = PARAMS, even: bool = False) -> None:
        super().__init__()
        self.units = nn.ModuleList(Even() if even else Unit(params) for _ in range(units))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """X [1, WIDTH] -> the loss."""
        for unit in self.units:
            x = unit(x)
        return self.head(x).sum()


def of_zerocore(model: Model, stage: int = 3, mesh: DeviceMesh | None = None) -> Model:
    return zerocore.shard(model, stage, units=[Unit], mesh=mesh)


def of_fsdp2(model: Model, mesh: DeviceMesh | None = None) -> Model:
    for unit in model.units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)  # the root, which stays gathered


def clear(model: Model) -> None:
    for param in model.parameters():
        param.grad = None


def step_of(model: Model) -> Callable[[], float]:
    """Gives the seconds of one forward and backward, from cleared gradients."""
    x = torch.ones(1, WIDTH)

    def run() -> float:
        clear(model)
        start = time.perf_counter()
        model(x).backward()
        return time.perf_counter() - start

    return run


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage is collected meanwhile."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def in_turns(timed: dict[str, Callable[[], float]], repeats: int) -> Seconds:
    """Seconds of each, A B C A B C; two rounds before that are not counted."""
    seconds: Seconds = {name: [] for name in timed}
    for repeat in range(repeats + 2):
        with quiet():
            for name, run in timed.items():
                found = run()
                if repeat >= 2:
                    seconds[name].append(found)
    return seconds


def pairs(a: list[float], b: list[float], f: Callable[[float, float], float]) -> float:
    """The median of f over neighbours in time."""
    return statistics.median(f(x, y) for x, y in zip(a, b, strict=True))


def added(seconds: Seconds, name: str, plain: str, units: int) -> list[float]:
    """Microseconds for each unit on top of the plain model, of every repeat."""
    return [1e6 * (a - b) / units for a, b in zip(seconds[name], seconds[plain], strict=True)]


def ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ms"


def check() -> None:
    """Both train as the plain model does, where there is nobody else, and talk as often elsewhere.

    Raises:
        SystemExit: if not.
    """
    torch.manual_seed(0)
    plain, x = Model(), torch.ones(1, WIDTH)
    alone = DeviceMesh("cpu", [0])
    ours = of_zerocore(copy.deepcopy(plain), mesh=alone)
    theirs = of_fsdp2(copy.deepcopy(plain), alone)
    losses = [model(x) for model in (plain, ours, theirs)]
    for loss in losses:
        loss.backward()
    grads = [[p.grad for p in plain.parameters()], [p.grad for p in ours.parameters()]]
    grads.append([p.grad.to_local() for p in theirs.parameters()])
    for i, name in enumerate(("zerocore", "FSDP2"), start=1):
        same = torch.equal(losses[i], losses[0]) and all(map(torch.equal, grads[i], grads[0]))
        if not same:
            raise SystemExit(f"{name}: expected the plain model's loss and gradients on one rank")
    # Every unit is gathered twice, the root once; FSDP2 gathers the last unit twice as well.
    ours, theirs = of_zerocore(Model()), of_fsdp2(Model())
    ours(x).backward()
    counts = {kind: c.calls for kind, c in zerocore.stats(ours).collectives.items()}
    with CommDebugMode() as debug:
        theirs(x).backward()
    calls = {str(op): count for op, count in debug.get_comm_counts().items()}
    gathers = sum(count for op, count in calls.items() if "gather" in op)
    scatters = sum(count for op, count in calls.items() if "scatter" in op)
    found = (counts["all_gather"], counts["reduce_scatter"], gathers, scatters)
    if found != (2 * UNITS, UNITS + 1, 2 * UNITS + 1, UNITS + 1):
        raise SystemExit(f"expected gathers and reductions of {UNITS} units, got {found}")
