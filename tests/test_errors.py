"""Bad input ends with a clear error on every rank; nothing hangs and nothing has changed."""

import datetime
import warnings

import models
import pytest
import scenarios
import sharded
import torch
import torch.distributed as dist
from reference import assert_same, clones
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerocore

ANY = (ValueError, RuntimeError, TypeError)


def error_of(call, kinds=(ValueError, RuntimeError)):
    """Type and text of the error of the call; None if there is none."""
    try:
        call()
    except kinds as error:
        return type(error).__name__, str(error)
    return None


def linear(width=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3))


def not_initialised():
    """What shard() says without a process group."""
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    found = error_of(lambda: zerocore.shard(linear(), 3))
    fresh = dist.PrefixStore("again", store)
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", store=fresh, rank=rank, world_size=size, timeout=timeout)
    return found


def test_process_group_not_initialised(ranks):
    for found in ranks(2, not_initialised):
        assert found is not None and "init_process_group" in found[1], found


BAD_CALLS = {
    "stage 7": (lambda m: zerocore.shard(m, 7), "7"),
    "stage -1": (lambda m: zerocore.shard(m, -1), "-1"),
    "stage as text": (lambda m: zerocore.shard(m, "3"), "stage"),
    "units by a wrong name": (lambda m: zerocore.shard(m, 3, units=["nowhere"]), "nowhere"),
    "units by a wrong class": (lambda m: zerocore.shard(m, 3, units=[nn.LSTM]), "LSTM"),
    "units by a predicate": (lambda m: zerocore.shard(m, 3, units=lambda n, x: False), "units"),
    "no parameters": (lambda m: zerocore.shard(nn.Sequential(nn.ReLU()), 3), "parameter"),
    "not a module": (lambda m: zerocore.shard(3, 3), "int"),
    "negative prefetch": (lambda m: zerocore.shard(m, 3, prefetch=-1), "prefetch"),
    "negative bucket": (lambda m: zerocore.shard(m, 3, bucket_bytes=-1), "bucket_bytes"),
    "mesh that is none": (lambda m: zerocore.shard(m, 3, mesh=2), "mesh"),
    "mesh of three dimensions": (
        lambda m: zerocore.shard(m, 3, mesh=init_device_mesh("cpu", (1, 1, dist.get_world_size()))),
        "mesh",
    ),
    "precision that is none": (
        lambda m: zerocore.shard(m, 3, mixed_precision=torch.bfloat16),
        "write MixedPrecision(param=torch.bfloat16)",
    ),
    "batch norm of two dtypes": (
        lambda m: zerocore.shard(
            nn.Sequential(m, nn.BatchNorm1d(2)),
            mixed_precision=zerocore.MixedPrecision(torch.bfloat16),
        ),
        "1 (BatchNorm1d): expected MixedPrecision(buffer=torch.bfloat16)",
    ),
}


def bad_call(name):
    """The error of a bad call, and whether the same model can be sharded properly afterwards."""
    model = linear()
    before = clones(model.state_dict())
    found = error_of(lambda: BAD_CALLS[name][0](model), ANY)
    assert_same(clones(model.state_dict()), before)
    zerocore.shard(model, 3)
    model(torch.ones(2, 4)).sum().backward()
    return found


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(ranks, name):
    for found in ranks(2, bad_call, name):
        assert found is not None, "expected an error"
        assert BAD_CALLS[name][1] in found[1], found


def outside_the_mesh():
    """A mesh of rank 0 alone: that rank's model works, another one gets an error."""
    model, mesh = linear(), DeviceMesh("cpu", [0])
    found = error_of(lambda: zerocore.shard(model, 3, mesh=mesh))
    model(torch.ones(2, 4)).sum().backward()
    return found


def test_a_mesh_without_this_rank(ranks):
    inside, outside = ranks(2, outside_the_mesh)
    assert inside is None
    assert outside is not None and "mesh" in outside[1] and "rank 1" in outside[1], outside


def uneven_groups():
    """The user has groups of some ranks, so that ranks are in different numbers of groups."""
    for members in ([0], [0, 1], [0]):
        dist.new_group(members)
    results = []
    for mesh in (None, DeviceMesh("cpu", list(range(dist.get_world_size())))):
        model = linear()
        zerocore.shard(model, 3, mesh=mesh)
        model(torch.ones(2, 4)).sum().backward()
        results.append(zerocore.stats(model).collectives["all_gather"].calls)
    return results


def test_groups_of_some_ranks_do_not_matter(ranks):
    assert all(all(calls) for calls in ranks(3, uneven_groups, seconds=60))


def one_bad_rank(kind):
    """One rank calls shard() in another way than the others."""
    odd = dist.get_rank() == 1
    model, options = linear(), {"stage": 3}
    if kind == "bad stage":
        options["stage"] = 7 if odd else 3
    elif kind == "other stage":
        options["stage"] = 1 if odd else 3
    elif kind == "other shapes":
        model = linear(5 if odd else 4)
    elif kind == "same sizes, other shapes":
        model = nn.Linear(*((2, 6) if odd else (6, 2)), bias=False)
    elif kind == "more parameters":
        model = nn.Sequential(linear(), *([nn.Linear(2, 2)] if odd else []))
    elif kind == "other names":
        model = nn.ModuleDict({"a" if odd else "b": linear()})
    elif kind == "other dtype":
        model = linear().double() if odd else linear()
    elif kind == "other frozen":
        model[0].weight.requires_grad_(not odd)
    elif kind == "other units":
        options["units"] = ["0"] if odd else ["1"]
    elif kind == "other precision":
        options["mixed_precision"] = zerocore.MixedPrecision(torch.bfloat16) if odd else None
    elif kind == "no parameters":
        model = nn.ReLU() if odd else model
    return error_of(lambda: zerocore.shard(model, **options))


KINDS = [
    "bad stage",
    "other stage",
    "other shapes",
    "same sizes, other shapes",
    "more parameters",
    "other names",
    "other dtype",
    "other frozen",
    "other units",
    "other precision",
    "no parameters",
]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_disagree_all_get_an_error(ranks, kind):
    for rank, found in enumerate(ranks(3, one_bad_rank, kind, seconds=20)):
        assert found is not None, f"rank {rank}: expected an error"
        assert "rank 1" in found[1] or rank == 1, (rank, found)


def shard_twice(stage):
    """The second shard() of a model, of a part, and of the whole after a part."""
    model = linear()
    zerocore.shard(model, stage)
    again = error_of(lambda: zerocore.shard(model, stage))
    part = error_of(lambda: zerocore.shard(model[0], stage))
    model(torch.ones(2, 4)).sum().backward()  # unharmed
    return again, part, all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("stage", [0, 3])
def test_shard_twice(ranks, stage):
    for again, part, trains in ranks(2, shard_twice, stage):
        assert again is not None and "shard" in again[1]
        assert part is not None and "shard" in part[1]
        assert trains


def whole_matrix_step(name, stage):
    """The error of the first step of an optimizer that needs whole matrices."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False))
    zerocore.shard(model, stage)
    opt = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    before = clones(zerocore.full_state_dict(model))
    closure = None
    if name == "LBFGS":

        def closure():
            opt.zero_grad()
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            return loss

    model(torch.ones(2, 4)).sum().backward()
    found = error_of(lambda: opt.step(closure))
    assert_same(clones(zerocore.full_state_dict(model)), before)
    return found


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon", "SparseAdam"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizers_that_need_whole_matrices(ranks, stage, name):
    for found in ranks(2, whole_matrix_step, name, stage):
        assert found is not None, "expected an error"
        assert name in found[1], found


class Unknown(torch.optim.Optimizer):
    """An optimizer that zerocore cannot know: plain descent."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        """One update."""
        for group in self.param_groups:
            for p in group["params"]:
                p -= 0.1 * p.grad


def unknown_optimizer():
    """Warnings of two unknown optimizers' steps, and of a known one's."""
    model = zerocore.shard(linear(), 3)
    counts = []
    for opt in (torch.optim.SGD(model.parameters()), Unknown(model.parameters())):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                opt.step()
                zerocore.shard(linear(), 3)  # another model is no reason to warn again
        counts.append(sum("Unknown" in str(w.message) or "SGD" in str(w.message) for w in caught))
    return counts


def test_unknown_optimizers_get_one_warning_on_rank_0(ranks):
    assert ranks(2, unknown_optimizer) == [[0, 1], [0, 0]]


def other_device(stage):
    """Inputs on another device: the error, and that a good step follows."""
    model = sharded.shard("transformer", stage)
    x, _ = models.batch("transformer", 0, 0)
    found = error_of(lambda: model(x.to("meta")))
    loss = sharded.step(model, None, "transformer", 0)
    return found, loss, zerocore.stats(model).windows.bytes


@pytest.mark.parametrize("stage", [0, 3])
def test_inputs_on_another_device(ranks, stage):
    for found, loss, held in ranks(2, other_device, stage):
        assert found is not None, "expected an error"
        assert "meta" in found[1] and "cpu" in found[1], found
        assert loss > 0 and held == 0


def forward_outside():
    """A unit's child called outside of the model's forward; a deep copy."""
    model = sharded.shard("transformer", 3)
    child = error_of(lambda: model.blocks[0].fc1(torch.ones(1, 12)))
    root = error_of(lambda: model.head(torch.ones(1, 12)))
    return child, root


def test_parameters_read_outside_of_forward(ranks):
    for child, root in ranks(2, forward_outside):
        assert child is not None
        assert root is not None


def wrong_objects():
    """Helpers given what they cannot take."""
    plain, sharded_model = linear(), zerocore.shard(linear(), 3)
    calls = {
        "info": lambda: zerocore.info(torch.nn.Parameter(torch.ones(2))),
        "stats": lambda: zerocore.stats(plain),
        "no_sync": lambda: zerocore.no_sync(plain).__enter__(),
        "gathered": lambda: zerocore.gathered(plain).__enter__(),
        "clip": lambda: zerocore.clip_grad_norm_(sharded_model, -1.0),
    }
    return {name: error_of(call, ANY) for name, call in calls.items()}


def test_helpers_refuse_what_is_not_sharded(ranks):
    for found in ranks(2, wrong_objects):
        for name, error in found.items():
            assert error is not None, f"{name}: expected an error"


def other_order(stage):
    """Rank 1 runs the layers in another order from the second step on."""
    net = scenarios.build("simple")
    model = zerocore.shard(net, stage, units=scenarios.SCENARIOS["simple"].units)

    def run():
        for step in range(4):
            net.order = (0, 2, 1) if dist.get_rank() == 1 and step >= 1 else (0, 1, 2)
            scenarios.simple(model, dist.get_rank(), step, 1.0)

    return error_of(run)


def leaves_out(stage):
    """Rank 1 never calls layer 1."""
    net = scenarios.build("simple")
    model = zerocore.shard(net, stage, units=scenarios.SCENARIOS["simple"].units)

    def run():
        for step in range(3):
            net.order = (0, 2) if dist.get_rank() == 1 else (0, 1, 2)
            model.zero_grad()
            scenarios.simple(model, dist.get_rank(), step, 1.0)

    error = error_of(run)
    return error, None if error else sharded.pieces(model)


@pytest.mark.parametrize("case", [other_order, leaves_out])
def test_ranks_that_run_different_units_do_not_hang(ranks, case):
    """Either every rank gets an error that names a unit, or all get the right result."""
    from ranks import Pool

    pool = Pool(2, group_seconds=5)
    try:
        outcomes = pool.outcomes(case, 3, seconds=30)
        for outcome in outcomes:
            assert outcome.kind in ("returned", "raised"), outcome
        texts = [str(outcome.value) for outcome in outcomes]
        if any("Error" in text for text in texts):
            assert all("Error" in text for text in texts), texts
            assert any("layers." in text for text in texts), texts
    finally:
        pool.close(1.0)
