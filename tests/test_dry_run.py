"""torch's fake process group: one process as a rank of as many as wanted."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from zerocore.planner.communication import Collectives

WIDTH, LAYERS, STEPS = 64, 3, 2


def train(ranks: int, rank: int, stage: int) -> tuple[str, dict[str, Collectives], list[int]]:
    """The backend, what was sent, and the sizes of this rank's shards; there are no other ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    zerocore.shard(model, stage, units=[nn.Linear])
    optimizer = zerocore.AdamW(model.parameters(), max_grad_norm=1.0)
    stats = zerocore.stats(model)
    stats.reset()
    for _ in range(STEPS):
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = zerocore.backend().name, stats.collectives, [p.numel() for p in model.parameters()]
    dist.destroy_process_group()
    return found


def save(rank: int) -> list[str]:
    """What saving and loading say."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    model = zerocore.shard(nn.Linear(WIDTH, WIDTH), 3)
    texts = []
    for function in (zerocore.save, zerocore.load):
        with pytest.raises(RuntimeError) as error:
            function("nowhere", model)
        texts.append(str(error.value))
    return texts


def serve(
    pipe: multiprocessing.connection.Connection, case: Callable[..., Any], args: tuple[int, ...]
) -> None:
    torch.set_num_threads(1)
    pipe.send(case(*args))


def in_a_process(case: Callable[..., Any], *args: int) -> Any:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, case, args))
    process.start()
    there.close()
    try:
        return here.recv()
    finally:
        process.join(30)
        assert process.exitcode == 0


@pytest.mark.parametrize(("ranks", "rank", "stage"), [(8, 3, 3), (8, 0, 2), (1024, 1023, 3)])
def test_a_rank_without_others_does_what_it_would_do_with_them(ranks, rank, stage):
    backend, sent, shards = in_a_process(train, ranks, rank, stage)
    assert backend == "fake"
    # 16 elements for each rank are the least that a flat buffer has.
    padded = max(WIDTH * WIDTH, 16 * ranks)
    assert shards == [max(0, min(padded // ranks, WIDTH * WIDTH - rank * padded // ranks))] * LAYERS
    part = padded // ranks * (ranks - 1)
    # At stage 3 the last unit of the forward stays for its backward.
    gathers = STEPS * (2 * LAYERS - 1) if stage == 3 else (STEPS - 1) * LAYERS
    assert sent["all_gather"] == Collectives(gathers, gathers * part, 4 * gathers * part)
    scatters = STEPS * LAYERS
    assert sent["reduce_scatter"] == Collectives(scatters, scatters * part, 4 * scatters * part)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_without_others_saves_nothing(rank):
    assert in_a_process(save, rank) == [
        f"zerocore.{name}: expected ranks that are there, got a fake process group, whose other "
        "ranks have no part to save or load"
        for name in ("save", "load")
    ]
