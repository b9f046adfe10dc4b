"""What the ranks agree on when a model is sharded: facts, and the first rank's values."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
from zerocore import registry
from zerocore.agreement import agree, gather_objects


class Odd(nn.Module):
    """Larger than the pieces that values travel in; ends of parameters and pieces never meet."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(5))
        self.large = nn.Parameter(torch.randn(1201, 1999))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(700, 1100).t())
        self.expanded = nn.Parameter(torch.randn(1, 900).expand(1300, 900))
        self.sliced = nn.Parameter(torch.randn(40, 60)[:, 3:50])
        self.narrow = nn.Parameter(torch.randn(77, 31).half())
        self.frozen = nn.Parameter(torch.randn(1234, 1001), requires_grad=False)
        self.conjugate = nn.Parameter(torch.randn(600, 501, dtype=torch.complex64).conj())
        self.last = nn.Parameter(torch.randn(()))


def first_wins(stage, mesh, mixed):
    if mesh is not None:
        mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(dist.get_rank())
    model = Odd()
    mine = {name: param.detach().clone() for name, param in model.named_parameters()}
    precision = zerocore.MixedPrecision(param=torch.bfloat16) if mixed else None
    zerocore.shard(model, stage, mesh=mesh, mixed_precision=precision)
    for name, value in zerocore.full_state_dict(model).items():
        expected = mine[name].resolve_conj().contiguous()
        if not mixed:  # frozen ones are held in bf16 then
            assert value.dtype == expected.dtype
            dist.broadcast(expected.reshape(-1).view(torch.uint8), 0)
            assert torch.equal(value, expected), name
        elif name in ("large", "turned", "expanded"):
            dist.broadcast(expected, 0)
            assert torch.equal(value, expected), name


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 3])
def test_values_of_the_first_rank_are_taken(ranks, size, stage, mixed):
    ranks(size, first_wins, stage, None, mixed)


@pytest.mark.parametrize("stage", [1, 3])
def test_values_over_replicas(ranks, stage):
    ranks(4, first_wins, stage, (2, 2), False)


def answers():
    """Values that are all the same, that differ in size, and in nothing but their content."""
    rank = dist.get_rank()
    groups = registry.sharded_as(zerocore.shard(nn.Linear(3, 3), 3)).groups
    host, journal = groups.host, groups.journal
    same = gather_objects("same", host, journal, {"a": [1, None]})
    sizes = gather_objects("sizes", host, journal, "x" * 100 * rank)
    content = gather_objects("content", host, journal, rank)
    said = []
    for error, fact in ((None, 4), (None, rank // 2), (KeyError("k") if rank == 1 else None, 4)):
        try:
            agree(host, journal, error, [("one", 1), ("two", fact)])
        except (ValueError, KeyError) as caught:
            said.append(str(caught))
    try:
        gather_objects("here" if rank == 0 else "there", host, journal, 1)
    except ValueError as caught:
        said.append(str(caught))
    return same, sizes, content, said


def test_what_ranks_tell_each_other(ranks):
    for rank, (same, sizes, content, said) in enumerate(ranks(3, answers)):
        assert same == [{"a": [1, None]}] * 3
        assert sizes == ["", "x" * 100, "x" * 200] and content == [0, 1, 2]
        facts, error, order = said
        assert "rank 0 has two 0, rank 2 has two 1" in facts
        assert error == "'k'" if rank == 1 else "failed on rank 1: KeyError('k')" in error
        assert f"rank {rank} called {'there' if rank else 'here'}, rank" in order
