"""MixedPrecision(buffer=...): buffers are narrow while modules compute, and never lose a value."""

import models
import pytest
import torch
import torch.distributed as dist
from reference import assert_same, clones
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerocore

LOW = torch.bfloat16
STAGES = [0, 1, 2, 3]


def policy(low=LOW):
    return zerocore.MixedPrecision(low, buffer=low, output=torch.float32)


class Normed(nn.Module):
    """[B, 1, 6, 6] to [B, 1, 4] with batch norms of every kind of momentum."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 3)
        self.quick = nn.BatchNorm2d(5)
        self.mean = nn.BatchNorm2d(5, momentum=None)  # a cumulative average
        # Each update of the slow one is smaller than what bf16 rounds away.
        self.slow = nn.BatchNorm2d(5, momentum=0.002)
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        x = self.mean(torch.relu(self.slow(self.conv(x))))
        return self.head(self.quick(torch.relu(x)).mean((2, 3))).unsqueeze(1)


def norm_batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(6, 1, 6, 6, generator=generator) * (1 + 0.5 * rank) + 0.3
    return x, torch.randint(4, (6, 1), generator=generator)


def train_norms(stage, mixed, steps=50):
    """The state after training of a model with batch norms, and the eval output."""
    torch.manual_seed(0)
    model = zerocore.shard(Normed(), stage, units=["quick", "slow"], mixed_precision=mixed)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        opt.zero_grad()
        models.loss_of(model, norm_batch(dist.get_rank(), step)).backward()
        opt.step()
    out = model.eval()(norm_batch(0, 99)[0]).detach()
    return clones(model.state_dict()), out


def train_norms_everywhere(low):
    return [train_norms(s, policy(low)) for s in STAGES], train_norms(0, None)


def initial_weight():
    """The head's, which training moves."""
    torch.manual_seed(0)
    return Normed().head.weight.detach()


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_batch_norm_trains(ranks, low):
    reports = ranks(2, train_norms_everywhere, low)
    for found, (exact, exact_out) in reports:
        for state, out in found:
            assert_same(state, found[0][0])
            assert torch.equal(out, found[0][1])
            for name, tensor in exact.items():
                assert state[name].dtype == tensor.dtype, name
                if "running" in name:
                    # Parameters of the runs differ by now; a stalled average is off by 5 %.
                    torch.testing.assert_close(state[name], tensor, rtol=0.01, atol=0.003)
            assert state["quick.num_batches_tracked"] == 50
            torch.testing.assert_close(out, exact_out, rtol=0.0, atol=0.03)
            moved = (exact["head.weight"] - initial_weight()).abs().max()
            error = (state["head.weight"] - exact["head.weight"]).abs().max()
            assert 0.1 * moved > error and moved > 0.002
    stats = [report[0][0][0]["quick.running_var"] for report in reports]
    assert not torch.equal(*stats), "running statistics are each rank's own"


def norms_in_odd_order():
    """Batch norm with two forwards before a backward, in eval, after an error, and in no_grad."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    zerocore.shard(model, mixed_precision=policy())
    norm, x = model[1], torch.randn(8, 3)
    mean = norm.running_mean
    (model(x).sum() + model(x + 1).sum()).backward()
    after_two = model.state_dict()["1.running_mean"]
    try:
        norm(torch.ones(2, 5, dtype=LOW))
    except RuntimeError:
        pass
    model.eval()(x)
    unchanged = model.state_dict()["1.running_mean"]
    with torch.no_grad():
        model.train()(x)
    with torch.inference_mode():
        model(x)
    assert norm.running_mean is mean and mean.dtype == LOW
    model(x).sum().backward()
    return after_two, unchanged, model.state_dict()["1.running_mean"]


def test_batch_norm_in_odd_order(ranks):
    for after_two, unchanged, last in ranks(2, norms_in_odd_order):
        assert torch.equal(after_two, unchanged)
        assert not torch.equal(last, after_two)
        assert not torch.equal(last, last.bfloat16().float()), "more than bf16 can tell"


class Kinds(nn.Module):
    """Buffers of every kind; the forward tells the dtypes, and writes to some as it is told."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", torch.randn(7, 3) * 100)
        self.register_buffer("twin", self.table)
        self.register_buffer("scale", torch.tensor(1.0012))
        self.register_buffer("mask", torch.tensor([0.1, float("-inf"), float("inf")]))
        self.register_buffer("wide", torch.randn(3, dtype=torch.float64))
        self.register_buffer("narrow", torch.randn(3).bfloat16())
        self.register_buffer("hidden", torch.randn(2, 2), persistent=False)
        self.register_buffer("count", torch.randint(100, ()))
        self.register_buffer("flags", torch.rand(9) > 0.5)
        self.register_buffer("phase", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("nothing", None)
        self.seen, self.write = {}, None

    def forward(self, x):
        self.seen = {name: buffer.dtype for name, buffer in self.named_buffers()}
        if self.write:
            self.write(self)
        return self.linear(x) * self.table.sum() * self.scale


def kinds(seed=0, **options):
    torch.manual_seed(seed)
    model = Kinds()
    before = clones(dict(model.named_buffers(remove_duplicate=False)))
    return zerocore.shard(model, mixed_precision=policy(), **options), before


def buffers_in(state):
    return clones({name: t for name, t in state.items() if not name.startswith("linear")})


def every_kind():
    """Dtypes in forward, and the state of right after shard() and a forward."""
    model, before = kinds(seed=dist.get_rank())  # rank 0's values are everybody's
    after = buffers_in(zerocore.full_state_dict(model))
    model(torch.randn(2, 3)).sum().backward()
    assert model.table is model.twin
    return before, model.seen, after, buffers_in(model.state_dict())


def test_every_kind_is_saved_exactly(ranks):
    reports = ranks(2, every_kind)
    expected = {n: t for n, t in reports[0][0].items() if n != "hidden"}
    for _, seen, first, second in reports:
        assert_same(first, expected)
        assert_same(second, expected)
        others = {"count": torch.int64, "flags": torch.bool, "phase": torch.complex64}
        low = dict.fromkeys(["table", "scale", "mask", "wide", "narrow", "hidden"], LOW)
        assert seen == low | others


class Shared(nn.Module):
    """Buffers whose elements share memory, or are conjugates of it."""

    def __init__(self, start):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("expanded", torch.arange(start, start + 3.0).expand(4, 3))
        phase = torch.complex(torch.arange(start, start + 3.0), torch.ones(3))
        self.register_buffer("conjugate", phase.conj())


def shared_memory(path):
    """Buffers after shard(), and in another model after load()."""
    model = zerocore.shard(Shared(10.0 * dist.get_rank()), 3)
    zerocore.save(path, model)
    other = zerocore.shard(Shared(70.0), 3)
    zerocore.load(path, other)
    return [{n: b.resolve_conj() for n, b in m.named_buffers()} for m in (model, other)]


def test_buffers_that_share_memory(ranks, tmp_path):
    expected = {name: buffer.resolve_conj() for name, buffer in Shared(0.0).named_buffers()}
    for after, loaded in ranks(2, shared_memory, tmp_path / "saved"):
        assert_same(after, expected)
        assert_same(loaded, expected)


def zero_part(model):
    model.table[2:4].zero_()
    model.mask[0] = 5.0


def overwrite(model):
    model.scale.fill_(0.0)
    model.mask.copy_(torch.tensor([1.0, 2.0, float("-inf")]))


def assign_low(model):
    model.table = model.table.clone()
    model.table[0] = 1.0


def assign_full(model):
    model.table = torch.full((7, 3), 1.0012)
    model.wide = torch.full((5,), 0.1)


def register(model):
    model.register_buffer("fresh", torch.tensor([1.0012]))
    model.nothing = torch.tensor(0.1)


WRITES = [zero_part, overwrite, assign_low, assign_full, register]


def written():
    """The states after each kind of write, twice, and those that the same writes make of fp32."""
    found = []
    for write in WRITES:
        model, before = kinds()
        plain = Kinds()
        plain.load_state_dict(before, strict=False)
        model.write = plain.write = write
        model(torch.randn(2, 3))
        plain(torch.randn(2, 3))
        once = buffers_in(model.state_dict())
        model.write = None
        model(torch.randn(2, 3))
        shown = {name: t.dtype for name, t in model.named_buffers() if t.is_floating_point()}
        shared = model.table is model.twin
        twice, expected = buffers_in(model.state_dict()), buffers_in(plain.state_dict())
        found.append((once, twice, expected, shown, shared))
    return found


def test_writes_are_found_and_the_rest_stays_exact(ranks):
    for report in ranks(2, written):
        for write, (once, twice, expected, shown, shared) in zip(WRITES, report, strict=True):
            assert_same(once, twice)
            assert_same(once, expected)
            assert set(shown.values()) == {LOW}, write.__name__
            assert shared == (write not in (assign_low, assign_full))


CAST = ["table", "twin", "scale", "mask", "wide"]


def refusal(call, *args, **kwargs):
    """The message of the error that a call raises."""
    try:
        call(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def loads():
    """A loaded state, the ones found after it, and errors."""
    model, _ = kinds()
    state = clones(model.state_dict())
    for name in ("table", "scale", "wide"):
        state[name] = state[name] * 1.7
    state["twin"] = state["table"]
    table, hidden = model.table, model.hidden.clone()
    model.load_state_dict(state | {"scale": state["scale"].reshape(1)})  # as old torch saved it
    assert model.table is table is model.twin
    assert torch.equal(table, state["table"].bfloat16())
    assert torch.equal(model.hidden, hidden)
    found = [buffers_in(model.state_dict())]
    errors = refusal(model.load_state_dict, state | {"table": torch.zeros(2)})
    found.append(buffers_in(model.state_dict()))
    errors = errors, refusal(model.load_state_dict, state, assign=True)
    for name, tensor in model.state_dict().items():
        if name in CAST:
            tensor.zero_()  # a copy
    found.append(buffers_in(model.state_dict()))
    return buffers_in(state), found, errors


def test_loads_are_exact(ranks):
    for expected, found, errors in ranks(2, loads):
        for state in found:
            assert_same(state, expected)
        assert "table" in errors[0] and "assign=False" in errors[1]


def loads_of_parts():
    """Buffers loaded without parameters: in another dtype, by assignment; and `float()`."""
    model, _ = kinds()
    model.load_state_dict({"scale": torch.tensor(3.3, dtype=torch.float64)}, strict=False)
    scale = model.state_dict()["scale"]
    values = {"scale": torch.tensor(4.4), "mask": torch.ones(3) * 1.0012}
    model.load_state_dict(values, strict=False, assign=True)
    states = [buffers_in(model.state_dict())]
    model(torch.randn(2, 3))
    states.append(buffers_in(model.state_dict()))
    model.float()
    model(torch.randn(2, 3))
    states.append(buffers_in(model.state_dict()))
    return scale, states, model.seen["table"], model.seen["mask"]


def test_loads_of_parts_are_exact(ranks):
    for scale, states, *seen in ranks(2, loads_of_parts):
        assert scale.dtype == torch.float32 and scale == torch.tensor(3.3)
        for state in states:
            assert state["scale"] == torch.tensor(4.4)
            assert torch.equal(state["mask"], torch.ones(3) * 1.0012)
            assert torch.equal(state["table"], states[0]["table"])
        assert seen == [LOW, LOW]


class Scaled(nn.Module):
    """A layer with a buffer to compute with, which its first forward makes anew."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("factor", torch.full((4,), 1.0012))
        self.assigned = False

    def forward(self, x):
        if not self.assigned:
            self.factor = torch.full((4,), 0.9012)
            self.assigned = True
        return (torch.tanh(self.linear(x)) * self.factor).to(x.dtype)


class Stack(nn.Module):
    """Two such layers; `checkpointed`: whether reentrant, None: not checkpointed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Scaled(), Scaled()])
        self.checkpointed = None

    def forward(self, x):
        for layer in self.layers:
            if self.checkpointed is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointed)
        return x


def recomputed(nested, kind):
    """Gradients of a step with a save before the backward; nested: layer 0 is a call's root."""
    torch.manual_seed(0)
    model = Stack()
    model.checkpointed = kind
    mixed = zerocore.MixedPrecision(LOW, buffer=LOW)
    if nested:
        zerocore.shard(model.layers[0], 2, mixed_precision=mixed)
    zerocore.shard(model, 2, mixed_precision=mixed)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss = model(x).sum()
    model.state_dict()
    loss.backward()
    return clones({n: p.grad for n, p in model.named_parameters()} | {"x": x.grad})


def recomputed_all():
    return [[recomputed(nested, kind) for kind in (None, False, True)] for nested in (False, True)]


def test_recomputation_sees_what_the_forward_saw(ranks):
    for report in ranks(2, recomputed_all):
        for plain, *others in report:
            for found in others:
                assert_same(found, plain)


def nested():
    """Each call's policy holds for its own modules; states are exact from outside and inside."""
    torch.manual_seed(0)
    model = nn.Sequential(Kinds(), nn.Sequential(Kinds(), nn.Linear(3, 3)), Kinds())
    before = clones(model.state_dict())
    half = zerocore.MixedPrecision(torch.float16, buffer=torch.float16, output=torch.float32)
    zerocore.shard(model[1], 3, mixed_precision=half)
    zerocore.shard(model[2], 2)
    zerocore.shard(model, 1, mixed_precision=policy())
    model(torch.randn(2, 3))
    seen = [model[0].seen["table"], model[1][0].seen["table"], model[2].seen["table"]]
    inner = clones(model[1].state_dict(prefix="1."))
    return before, seen, clones(model.state_dict()), inner


def test_nested_calls_own_their_buffers(ranks):
    for before, seen, state, inner in ranks(2, nested):
        assert seen == [LOW, torch.float16, torch.float32]
        assert_same(state, before)
        assert_same(inner, {n: t for n, t in before.items() if n.startswith("1.")})
