"""Sharding inside one dimension of a mesh, replicating over the other."""

import models
import pytest
import sharded
import test_breadth
import torch
import torch.distributed as dist
from reference import assert_as_exact, assert_same
from test_parity import plain, trained
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerocore


@pytest.mark.parametrize("job", ["transformer", "odd", "cnn"])
def test_two_by_two_equals_four_ranks_within_rounding(ranks, job):
    ((flat, _),) = trained(ranks, 4, job, "adamw", (3,))
    hybrid = trained(ranks, 4, job, "adamw", (1, 2, 3), mesh=(2, 2))
    for other, _ in hybrid[1:]:
        assert_same(other.parameters, hybrid[0][0].parameters)
        assert_same(other.gradients, hybrid[0][0].gradients)
    exact = plain(job, "adamw", 4, dtype=torch.float64)
    ours = plain(job, "adamw", 4)
    for found in (flat, hybrid[0][0]):
        assert_as_exact(found.parameters, ours.parameters, exact.parameters)
        assert_as_exact(found.gradients, ours.gradients, exact.gradients)


def count_step(stage, mesh):
    """Collectives of a step, messages seen by the profiler, padded sizes; after a first step."""
    model = sharded.shard("transformer", stage, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded.step(model, opt, "transformer", 0)
    zerocore.stats(model).reset()
    with sharded.Sent() as sent:
        sharded.step(model, opt, "transformer", 1)
    stats = zerocore.stats(model)
    return dict(stats.collectives), sent.elements, dict(stats.units)


@pytest.mark.parametrize("mesh", [(2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_collectives_of_each_dimension(ranks, stage, mesh):
    replicas, shards = mesh
    for collectives, sent, units in ranks(4, count_step, stage, mesh):
        total = sum(unit.padded for unit in units.values())
        last = units[models.BLOCKS[-1]].padded
        again = total - units[""].padded - last if stage == 3 else 0
        gathered = (total + again) * (shards - 1) // shards
        scattered = total * (shards - 1) // shards
        reduced = 2 * (total // shards) * (replicas - 1) // replicas
        found = {kind: traffic.elements for kind, traffic in collectives.items()}
        assert found.get("all_gather", 0) == gathered
        assert found.get("reduce_scatter", 0) == scattered
        assert found.get("all_reduce", 0) == reduced
        agreed = found["control"] * 2  # a message in each of two rounds
        assert sent == gathered + scattered + reduced + agreed
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            if kind in collectives:
                assert collectives[kind].bytes == 4 * collectives[kind].elements


def test_padding_lets_replicas_split_a_shard(ranks):
    for _, _, units in ranks(4, count_step, 3, (2, 2)):
        model = models.build("transformer")
        for name, unit in units.items():
            if name:
                numels = [p.numel() for p in model.get_submodule(name).parameters()]
                assert (unit.padded, unit.shard) == sharded.padded(numels, 2, 2)
                assert unit.parameters == sum(numels)


def shards_of_replicas():
    """Each rank's range of every parameter, and the values in it, after some training."""
    model = sharded.shard("transformer", 3, mesh=(2, 2))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(3):
        sharded.step(model, opt, "transformer", number)
    return dist.get_rank(), {
        n: (*zerocore.info(p)[-2:], p.detach()) for n, p in model.named_parameters()
    }


def test_replicas_hold_the_same_shards(ranks):
    reports = dict(ranks(4, shards_of_replicas))
    for name in reports[0]:
        for one, other in ((0, 2), (1, 3)):  # columns of the mesh [[0, 1], [2, 3]]
            assert reports[one][name][:2] == reports[other][name][:2]
            assert torch.equal(reports[one][name][2], reports[other][name][2]), name
    assert any(reports[0][name][:2] != reports[1][name][:2] for name in reports[0])


@pytest.mark.parametrize("name", ["two forwards", "unused on one rank", "unfreezing", "checkpoint"])
def test_scenarios(ranks, name):
    by_rank = ranks(4, run_scenario, name)
    test_breadth.check(name, 4, by_rank)


def run_scenario(name):
    """A scenario at the sharding stages of a 2x2 mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return test_breadth.run_sharded(name, stages=(1, 2, 3), mesh=mesh)


def trained_on(ranks_of_mesh, stage):
    """A loss after a step of models that differ between ranks before shard()."""
    torch.manual_seed(dist.get_rank())
    # The last one is large enough for ranks to read it in each other's memory.
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 8192)
    )
    model[1].running_mean.fill_(dist.get_rank())
    zerocore.shard(model, stage, mesh=DeviceMesh("cpu", ranks_of_mesh))
    optimizer = zerocore.AdamW(model.parameters(), lr=0.1)
    x = torch.arange(20.0).reshape(4, 5)
    model(x).square().sum().backward()
    optimizer.step()
    return zerocore.full_state_dict(model)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("mesh", [[3, 1, 0, 2], [[2, 0], [3, 1]], [[1, 3], [0, 2]]])
def test_ranks_in_any_order(ranks, mesh, stage):
    """All have what the lowest rank had."""
    expected = ranks(4, trained_on, [0, 1, 2, 3], stage)[0]
    for state in ranks(4, trained_on, mesh, stage):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, msg=lambda m, n=name: f"{n}: {m}")


def crossed():
    try:
        zerocore.shard(torch.nn.Linear(5, 7), 3, mesh=DeviceMesh("cpu", [[0, 3], [2, 1]]))
    except ValueError as error:
        return str(error)
    return None


def test_replicas_in_different_orders_are_refused(ranks):
    """Rank 0 would replicate the second shard, of which rank 2 has the first."""
    for message in ranks(4, crossed):
        assert message is not None and "same order" in message and "[0, 3], [2, 1]" in message
