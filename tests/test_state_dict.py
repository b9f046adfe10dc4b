"""States and gathered parameters: the model behaves like the one it was."""

import io

import models
import pytest
import sharded
import torch
import torch.distributed as dist
from reference import assert_same, clones

import zerocore

JOBS = ["transformer", "cnn", "odd", "mixed64", "mixed16"]
STAGES = [0, 1, 2, 3]


def state_of(job, stage, how):
    """The full state right after shard(), by the given call."""
    model = sharded.shard(job, stage)
    state = zerocore.full_state_dict(model) if how == "full_state_dict" else model.state_dict()
    strides = {name: tensor.stride() for name, tensor in state.items()}
    return clones(state), strides, type(state).__name__, [t.requires_grad for t in state.values()]


@pytest.mark.parametrize("how", ["state_dict", "full_state_dict"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("job", JOBS)
def test_state_is_that_of_the_model_before(ranks, job, stage, how):
    expected = models.build(job).state_dict()
    for state, _, _, needs_grad in ranks(3, state_of, job, stage, how):
        assert_same(state, expected)
        assert not any(needs_grad)


def trained(job, stage, steps=2, **options):
    """A sharded model and its optimizer after some steps."""
    model = sharded.shard(job, stage, **options)
    opt = zerocore.AdamW(model.parameters(), lr=1e-2)
    for number in range(steps):
        sharded.step(model, opt, job, number)
    return model, opt


def save(job, stage, **options):
    """The state of a trained model as bytes, and what its next step gives."""
    model, _ = trained(job, stage, **options)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    out = model.eval()(models.batch(job, 0, 5)[0]).detach()
    return buffer.getvalue(), out


def load(job, stage, saved, **options):
    """Loads into a model with other weights; the state, and the output of a forward."""
    model = sharded.shard(job, stage, seed=9, **options)
    parameters = list(model.parameters())
    result = model.load_state_dict(torch.load(io.BytesIO(saved)))
    assert not result.missing_keys and not result.unexpected_keys
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    out = model.eval()(models.batch(job, 0, 5)[0]).detach()
    loss = models.loss_of(model.train(), models.batch(job, dist.get_rank(), 0))
    loss.backward()  # still trains
    return clones(model.state_dict()), out


@pytest.mark.parametrize("job", ["transformer", "odd", "mixed16"])
def test_states_move_between_stages_and_sizes(ranks, job):
    saved, out = ranks(2, save, job, 3)[0]
    expected = torch.load(io.BytesIO(saved))
    plain = models.build(job)
    plain.load_state_dict(expected)
    assert torch.equal(plain.eval()(models.batch(job, 0, 5)[0]), out)
    for size, stage in ((2, 0), (2, 1), (2, 2), (2, 3), (3, 3), (1, 3), (3, 1)):
        for state, found in ranks(size, load, job, stage, saved):
            assert_same(state, expected)
            assert torch.equal(found, out)


def test_hybrid_states(ranks):
    saved, out = ranks(4, save, "transformer", 3, mesh=(2, 2))[0]
    for state, found in ranks(4, load, "transformer", 3, saved, mesh=(2, 2)):
        assert_same(state, torch.load(io.BytesIO(saved)))
        assert torch.equal(found, out)


def mixed_precision_state():
    """Full states of a bf16 model have the fp32 masters; loading writes them."""
    policy = zerocore.MixedPrecision(torch.bfloat16, output=torch.float32)
    model, _ = trained("transformer", 3, mixed_precision=policy)
    state = clones(model.state_dict())
    doubled = {name: 2 * tensor for name, tensor in state.items()}
    model.load_state_dict(doubled)
    return state, doubled, clones(model.state_dict())


def test_mixed_precision_states_are_fp32(ranks):
    for state, doubled, after in ranks(2, mixed_precision_state):
        assert {t.dtype for t in state.values()} == {torch.float32}
        assert any(not torch.equal(t, t.bfloat16().float()) for t in state.values())
        assert_same(after, doubled)


def reading_between(stage, reads):
    """Training with or without reading the state between forward, backward and step."""
    model = sharded.shard("transformer", stage)
    opt = zerocore.AdamW(model.parameters(), lr=1e-2)

    def read():
        if reads:
            model.state_dict()
            with zerocore.gathered(model.blocks[1]):
                pass

    for number in range(3):
        opt.zero_grad()
        loss = models.loss_of(model, models.batch("transformer", dist.get_rank(), number))
        loss.backward()
        read()
        opt.step()
        read()
    return clones(zerocore.full_state_dict(model))


@pytest.mark.parametrize("stage", STAGES)
def test_reading_disturbs_nothing(ranks, stage):
    expected = ranks(2, reading_between, stage, False)
    assert_same(ranks(2, reading_between, stage, True)[0], expected[0])


def states_are_copies(stage):
    """A state does not change with later steps."""
    model, opt = trained("transformer", stage)
    state = model.state_dict()
    before = clones(state)
    sharded.step(model, opt, "transformer", 7)
    return state, before, clones(model.state_dict())


@pytest.mark.parametrize("stage", [1, 3])
def test_states_do_not_change_with_later_steps(ranks, stage):
    for state, before, after in ranks(2, states_are_copies, stage):
        assert_same(state, before)
        assert all(not torch.equal(after[name], before[name]) for name in before)


def bad_loads(stage):
    """Errors of states that do not fit, on every rank, and the state after them."""
    model = sharded.shard("transformer", stage)
    before = clones(model.state_dict())
    messages = {}
    for kind in ("missing", "unexpected", "shape"):
        state = clones(before)
        if kind == "missing":
            del state["norm.bias"]
        elif kind == "unexpected":
            state["stranger"] = torch.zeros(2)
        else:
            state["norm.bias"] = torch.zeros(5)
        try:
            model.load_state_dict(state)
            messages[kind] = ""
        except RuntimeError as error:
            messages[kind] = str(error)
    state = {name: tensor + 1 for name, tensor in before.items() if name != "norm.bias"}
    result = model.load_state_dict(state | {"stranger": torch.zeros(2)}, strict=False)
    lists = (list(result.missing_keys), list(result.unexpected_keys))
    return messages, lists, before, clones(model.state_dict())


@pytest.mark.parametrize("stage", [0, 3])
def test_states_that_do_not_fit(ranks, stage):
    for messages, lists, before, after in ranks(2, bad_loads, stage):
        assert "norm.bias" in messages["missing"]
        assert "stranger" in messages["unexpected"]
        assert "norm.bias" in messages["shape"]
        assert lists == (["norm.bias"], ["stranger"])
        for name, tensor in after.items():
            expected = before[name] if name == "norm.bias" else before[name] + 1
            assert torch.equal(tensor, expected), name


def gathered_values(stage):
    """Full parameters inside gathered(), shards outside, and values written back from rank 0."""
    model = sharded.shard("odd", stage)
    shapes = [tuple(p.shape) for p in model.parameters()]
    with zerocore.gathered(model):
        inside = clones(dict(model.named_parameters()))
        strides = {name: p.stride() for name, p in model.named_parameters()}
    assert [tuple(p.shape) for p in model.parameters()] == shapes
    with zerocore.gathered(model.inner):
        child = clones(dict(model.inner.named_parameters()))
    with zerocore.gathered(model, write=True), torch.no_grad():
        for number, p in enumerate(model.parameters()):
            if p.numel():
                p.fill_(number + 10 * dist.get_rank() + 1)
    written = clones(dict(zerocore.full_state_dict(model)))
    return inside, strides, child, written


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_gathered(ranks, stage, size):
    plain = models.build("odd")
    expected = dict(plain.named_parameters())
    for inside, strides, child, written in ranks(size, gathered_values, stage):
        assert_same(inside, clones(expected))
        assert_same(child, clones(dict(plain.inner.named_parameters())))
        for name in ("transposed", "permuted"):  # dense: the memory order stays
            assert strides[name] == expected[name].stride()
        for number, (name, p) in enumerate(expected.items()):
            assert torch.equal(written[name], torch.full_like(p, number + 1)), name


def change_without_write(stage):
    """The error of changing gathered parameters without asking to write."""
    model = sharded.shard("transformer", stage)
    try:
        with zerocore.gathered(model.blocks[0]), torch.no_grad():
            model.blocks[0].fc1.weight.zero_()
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("stage", STAGES)
def test_changes_without_write_are_an_error(ranks, stage):
    for message in ranks(2, change_without_write, stage):
        assert message is not None, "expected a RuntimeError"
        assert "write=True" in message and "blocks.0" in message, message


def gathered_then_trains(write):
    """An exception inside gathered() leaves a model that trains."""
    model, opt = trained("transformer", 3)
    before = clones(zerocore.full_state_dict(model))
    try:
        with zerocore.gathered(model, write=write):
            raise KeyError("inside")
    except KeyError:
        pass
    after = clones(zerocore.full_state_dict(model))
    sharded.step(model, opt, "transformer", 5)
    return before, after, zerocore.stats(model).windows.bytes


@pytest.mark.parametrize("write", [False, True])
def test_exception_inside_gathered(ranks, write):
    for before, after, held in ranks(2, gathered_then_trains, write):
        assert_same(after, before)
        assert held == 0


def submodule_state():
    """State of a unit alone, and under a prefix."""
    model = sharded.shard("transformer", 3)
    return clones(model.blocks[1].state_dict()), clones(model.state_dict(prefix="outer."))


def test_state_of_a_submodule(ranks):
    plain = models.build("transformer")
    for block, prefixed in ranks(2, submodule_state):
        assert_same(block, plain.blocks[1].state_dict())
        assert_same(prefixed, plain.state_dict(prefix="outer."))


class Twice(torch.nn.Module):
    """A parameter under two names of one module."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(6, 5))
        self.other = torch.nn.Linear(5, 3)
        self.second = self.first


def load_twice(stage):
    """What a model with other values has after it loaded `Twice()`'s state."""
    torch.manual_seed(0)
    expected = Twice().state_dict()
    model = zerocore.shard(Twice(), stage)
    model.load_state_dict(expected)
    return zerocore.full_state_dict(model), expected


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_with_two_names_in_one_module_loads(ranks, stage):
    for state, expected in ranks(3, load_twice, stage):
        assert_same(state, expected)
