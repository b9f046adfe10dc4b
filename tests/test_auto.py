"""zerocore.shard(stage="auto"): the lowest stage that leaves half of the free memory."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerocore
from zerocore import auto

PARAMETERS = 16 * 256 * 256  # fp32, 2 ranks: stage 0 holds 16 bytes each, 1 and 2 10, 3 8


def model():
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))


def chosen(free, least=None, **options):
    """What the ledger says of the stage, and bytes held after a step."""
    real = auto.free_bytes
    mine = least if least is not None and dist.get_rank() == 1 else free
    auto.free_bytes = lambda device: int(mine)
    try:
        sharded = zerocore.shard(model(), "auto", bucket_bytes=0, **options)
    finally:
        auto.free_bytes = real
    optimizer = zerocore.AdamW(sharded.parameters())
    sharded(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    ledger = zerocore.ledger(sharded, optimizer)
    held = sum(row.bytes for row in ledger.rows)
    return ledger.stages[0], held


@pytest.mark.parametrize(
    ("bytes_per_parameter", "stage"), [(100, 0), (36, 0), (32, 1), (24, 1), (21, 3)]
)
def test_the_lowest_stage_that_fits(ranks, bytes_per_parameter, stage):
    # Half of it counts for state; on one host the two ranks share what is free, and the model that
    # is there already is part of the state. What is on its way takes some more.
    free = 2 * (bytes_per_parameter * PARAMETERS - 4 * PARAMETERS)
    for text, held in ranks(2, chosen, free):
        assert text.startswith(f"stage {stage} on 2 ranks (auto: needs "), text
        expected = {0: 16, 1: 10, 3: 8}[stage] * PARAMETERS
        assert held == expected


def test_the_rank_that_has_least_decides(ranks):
    texts = [text for text, _ in ranks(2, chosen, 1e12, least=2 * 17 * PARAMETERS)]
    assert texts[0] == texts[1] and texts[0].startswith("stage 3")


def warned():
    first = dist.get_rank() == 0
    with pytest.warns(UserWarning, match="are free") if first else contextlib.nullcontext():
        return chosen(100)[0]


def test_too_little_for_any(ranks):
    for text in ranks(2, warned):
        assert text.startswith("stage 3")


def other_call():
    try:
        zerocore.shard(model(), "auto" if dist.get_rank() else 3)
    except ValueError as error:
        return str(error)
    return None


def test_ranks_that_differ(ranks):
    for message in ranks(2, other_call):
        assert "stage" in message and "auto" in message


def test_measured_memory():
    free = auto.free_bytes(torch.device("cpu"))
    assert 1e8 < free < 1e13
