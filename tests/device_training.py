"""Training on devices is the same as on CPU ranks over gloo: in bits, where the design promises it.

The tests of every kind of device: a test file imports them all, and has a fixture `devices`, as
`ranks` is for the CPU. A case runs on either kind of ranks and returns CPU tensors. Two ranks sum
the same numbers in either order, so only norms (whose blocks a device sums in an order, or a dtype,
of its own) may differ in bits.
"""

import contextlib
import sys
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from reference import EPS, assert_same, clones
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import zerocore

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "gpt.py"
sys.path.append(str(EXAMPLE.parent))
from gpt import GPT, Block  # noqa: E402

STAGES = [0, 1, 2, 3]
BF16 = zerocore.MixedPrecision(param=torch.bfloat16)
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=EPS, foreach=False),
    "zerocore": lambda p: zerocore.AdamW(p, lr=1e-2, eps=EPS),
}


@pytest.fixture(scope="module")
def of_cpu_ranks(ranks):
    """Results of cases that have run: a case is the same under all schedules."""
    known = {}

    def run(size, case, *args, **kwargs):
        key = (size, case.__name__, repr(args), repr(kwargs))
        if key not in known:
            known[key] = ranks(size, case, *args, **kwargs)
        return known[key]

    return run


@pytest.fixture
def both(of_cpu_ranks, devices):
    """`both(size, case, *args)`: results by rank, of CPU ranks and of the devices'."""

    def run(size, case, *args, **kwargs):
        return of_cpu_ranks(size, case, *args, **kwargs), devices(size, case, *args, **kwargs)

    return run


def device_of_ranks():
    return zerocore.backend().device


def build(job, stage, *, seed=0, **options):
    """The job's model on the ranks' device, sharded."""
    options.setdefault("units", models.JOBS[job].units)
    model = zerocore.shard(models.build(job, seed).to(device_of_ranks()), stage, **options)
    assert {p.device for p in model.parameters()} == {device_of_ranks()}
    return model


def batch(job, number):
    """This rank's part of a batch, on its device."""
    return tuple(t.to(device_of_ranks()) for t in models.batch(job, dist.get_rank(), number))


def loss_of(model, part):
    # The CPU has a fused attention of its own.
    with sdpa_kernel(SDPBackend.MATH):
        return models.loss_of(lambda x: model(x).float(), part)


def on_host(tensors):
    return {name: None if t is None else t.cpu() for name, t in clones(tensors).items()}


def gradients(model):
    return {n: None if p.grad is None else p.grad.cpu() for n, p in model.named_parameters()}


def train(job, stage, optimizer, precision=None, steps=4, **options):
    """Losses, this rank's gradients of every step, full parameters."""
    model = build(job, stage, mixed_precision=precision, **options)
    return steps_of(model, OPTIMIZERS[optimizer](model.parameters()), job, steps)


def steps_of(model, opt, job, steps=4):
    losses, grads = [], {}
    for step in range(steps):
        opt.zero_grad()
        loss = loss_of(model, batch(job, step))
        loss.backward()
        grads |= {f"{step} {name}": g for name, g in gradients(model).items()}
        opt.step()
        losses.append(loss.detach())
    losses = torch.stack(losses).cpu()
    return losses, grads, on_host(zerocore.full_state_dict(model))


def assert_bits(reports):
    """Of (losses, gradients, parameters) by rank and kind of ranks."""
    cpu, device = reports
    for expected, found in zip(cpu, device, strict=True):
        assert found[0].isfinite().all() and torch.equal(found[0], expected[0])
        assert_same(found[1], expected[1])
        assert_same(found[2], expected[2])
    assert_same(device[0][2], device[1][2])


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("stage", STAGES)
def test_training_is_bit_equal_to_cpu_ranks(both, stage, optimizer, precision):
    assert_bits(both(2, train, "transformer", stage, optimizer, precision))


@pytest.mark.parametrize("job", ["attention", "odd"])
@pytest.mark.parametrize("stage", [0, 3])
def test_other_models(both, stage, job):
    assert_bits(both(2, train, job, stage, "sgd"))


def train_moved(stage):
    """As `train`; shard() moves the model, and an optimizer of before steps it."""
    model = models.build("transformer")
    before = dict(model.named_parameters())
    opt = OPTIMIZERS["adamw"](model.parameters())
    zerocore.shard(model, stage, units=models.BLOCKS)
    assert {p.device for p in model.parameters()} == {device_of_ranks()}
    assert all(p is before[name] for name, p in model.named_parameters())
    assert model.head.weight is model.embed.weight
    return steps_of(model, opt, "transformer")


@pytest.mark.parametrize("stage", STAGES)
def test_shard_moves_a_model_to_the_device(both, stage):
    assert_bits(both(2, train_moved, stage))


WINDOWS = {
    "no reshard": {"reshard_after_forward": False},
    "no prefetch": {"prefetch": 0},
    "deep prefetch": {"prefetch": 3},
    "small units": {"units": None, "bucket_bytes": 1},
    "budget": {"prefetch": 2, "max_window_bytes": 11_000},
}


@pytest.mark.parametrize("options", WINDOWS.values(), ids=WINDOWS)
def test_windows(both, options):
    assert_bits(both(2, train, "transformer", 3, "adamw", **options))


def train_on_another_stream(*args):
    """As `train`, with all of it on a stream that is not the default one."""
    if device_of_ranks().type == "cpu":
        return train(*args)
    torch.accelerator.synchronize()
    with torch.Stream(device_of_ranks()):
        return train(*args)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_users_stream_is_used(both, stage):
    assert_bits(both(2, train_on_another_stream, "transformer", stage, "adamw"))


def hybrid(stage, precision):
    names = ("replicate", "shard")
    mesh = init_device_mesh(device_of_ranks().type, (2, 2), mesh_dim_names=names)
    return train("transformer", stage, "adamw", precision, steps=2, mesh=mesh)


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid_sharding_is_bit_equal_to_cpu_ranks(both, stage, precision):
    # Two ranks in either dimension: the order of sums cannot differ.
    assert_bits(both(4, hybrid, stage, precision))


def four_ranks(stage):
    return train("transformer", stage, "sgd", steps=2)


@pytest.mark.parametrize("stage", [0, 3])
def test_four_ranks_are_equal_within_rounding(both, stage):
    cpu, device = both(4, four_ranks, stage)
    for expected, found in zip(cpu, device, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert_same(found[2], device[0][2])


def accumulate(stage, replicas_only, mesh=None):
    if mesh is not None:
        names = ("replicate", "shard")
        mesh = init_device_mesh(device_of_ranks().type, mesh, mesh_dim_names=names)
    model = build("transformer", stage, mesh=mesh)
    opt = OPTIMIZERS["sgd"](model.parameters())
    losses, grads = [], {}
    for step in range(3):
        opt.zero_grad()
        for micro in range(3):
            last = micro == 2
            holding = zerocore.no_sync(model, replicas_only=replicas_only)
            with contextlib.nullcontext() if last else holding:
                loss = loss_of(model, batch("transformer", 10 * step + micro)) / 3
                loss.backward()
            losses.append(loss.detach())
        grads |= {f"{step} {name}": g for name, g in gradients(model).items()}
        opt.step()
    return torch.stack(losses).cpu(), grads, on_host(zerocore.full_state_dict(model))


@pytest.mark.parametrize("stage", STAGES)
def test_accumulation(both, stage):
    assert_bits(both(2, accumulate, stage, False))


def test_accumulation_over_replicas_only(both):
    assert_bits(both(4, accumulate, 2, True, (2, 2)))


def two_forwards(stage):
    """Two forwards before their backwards; one of them alone in eval mode between."""
    model = build("transformer", stage)
    opt = OPTIMIZERS["adamw"](model.parameters())
    losses, grads = [], {}
    for step in range(3):
        opt.zero_grad()
        pair = [loss_of(model, batch("transformer", 10 * step + i)) for i in range(2)]
        with torch.no_grad():
            losses.append(loss_of(model.eval(), batch("transformer", 99)))
        model.train()
        pair[0].backward()
        pair[1].backward()
        grads |= {f"{step} {name}": g for name, g in gradients(model).items()}
        opt.step()
        losses += [loss.detach() for loss in pair]
    return torch.stack(losses).cpu(), grads, on_host(zerocore.full_state_dict(model))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_forwards_before_two_backwards(both, stage):
    assert_bits(both(2, two_forwards, stage))


def clip(stage, how, precision=None):
    """Norms and full parameters of a training whose gradients are clipped hard."""
    model = build("transformer", stage, mixed_precision=precision)
    kind = {"max_grad_norm": 0.1} if how == "optimizer" else {}
    opt = zerocore.AdamW(model.parameters(), lr=1e-2, eps=EPS, **kind)
    norms = []
    for step in range(4):
        opt.zero_grad()
        loss_of(model, batch("transformer", step)).backward()
        if how == "zerocore":
            norms.append(zerocore.clip_grad_norm_(model, 0.1))
        elif how == "torch":
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        opt.step()
    assert all(norm.device == device_of_ranks() for norm in norms)
    return [norm.item() for norm in norms], on_host(zerocore.full_state_dict(model))


@pytest.mark.parametrize("how", ["zerocore", "torch", "optimizer"])
@pytest.mark.parametrize("stage", STAGES)
def test_clipping(both, stage, how):
    cpu, device = both(2, clip, stage, how)
    for expected, found in zip(cpu, device, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert_same(found[1], device[0][1])
    if how != "optimizer":
        assert min(device[0][0]) > 0.2, "norms are far above what they are clipped to"


def test_our_optimizer_in_bf16(both):
    for expected, found in zip(*both(2, clip, 3, "zerocore", BF16), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def scale(stage, optimizer):
    """fp16 with a gradient of one rank that overflows in step 2: scales, and parameters."""
    precision = zerocore.MixedPrecision(param=torch.float16, reduce=torch.float32)
    model = build("transformer", stage, mixed_precision=precision)
    opt = OPTIMIZERS[optimizer](model.parameters())
    device = device_of_ranks().type
    scaler = zerocore.GradScaler(device, init_scale=2.0**10, growth_interval=2)
    scales, states = [], []
    for step in range(5):
        opt.zero_grad()
        loss = loss_of(model, batch("transformer", step))
        if step == 2 and dist.get_rank() == 1:
            loss = loss * 1e9
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        scales.append(scaler.get_scale())
        states.append(on_host(zerocore.full_state_dict(model)))
    return scales, states


@pytest.mark.parametrize("optimizer", ["zerocore", "sgd"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_loss_scaling(both, stage, optimizer):
    cpu, device = both(2, scale, stage, optimizer)
    for (expected_scales, expected), (scales, states) in zip(cpu, device, strict=True):
        assert scales == expected_scales == [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11]
        assert_same(states[2], states[1])  # the step was skipped
        torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-6)


def round_trip(stage, other_stage):
    """Saved after two steps, loaded into another model, which goes on like the first."""
    model = build("transformer", stage)
    opt = OPTIMIZERS["adamw"](model.parameters())
    sharded_step(model, opt, 0)
    sharded_step(model, opt, 1)
    state = zerocore.full_state_dict(model)
    assert {t.device for t in state.values()} == {device_of_ranks()}
    moments = zerocore.optimizer_state_dict(model, opt)
    other = build("transformer", other_stage, seed=1)
    other_opt = OPTIMIZERS["adamw"](other.parameters())
    other.load_state_dict(on_host(state))
    zerocore.load_optimizer_state_dict(other, other_opt, moments)
    assert_same(on_host(zerocore.full_state_dict(other)), on_host(state))
    sharded_step(model, opt, 2)
    sharded_step(other, other_opt, 2)
    first, second = (on_host(zerocore.full_state_dict(m)) for m in (model, other))
    assert_same(second, first)
    with zerocore.gathered(other):
        inside = on_host(dict(other.named_parameters(remove_duplicate=False)))
    assert_same({k: inside[k] for k in second}, second)
    return second


def sharded_step(model, opt, number):
    opt.zero_grad()
    loss_of(model, batch("transformer", number)).backward()
    opt.step()


@pytest.mark.parametrize("stages", [(3, 3), (3, 0), (1, 2), (0, 3)])
def test_states_make_a_round_trip(both, stages):
    cpu, device = both(2, round_trip, *stages)
    assert_same(device[0], cpu[0])
    assert_same(device[1], cpu[1])


class MayFail(torch.nn.Module):
    """A layer whose backward fails when it is told to."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.fails = layer, False

    def forward(self, *args, **kwargs):
        out = self.layer(*args, **kwargs)
        return models.Fails.apply(out) if self.fails else out


def failing(stage):
    """Backwards that fail between others that do not: the thread of a device may be late."""
    torch.manual_seed(0)
    first, second, third = (torch.nn.Linear(16, 16) for _ in range(3))
    layers = [first, MayFail(second), third]
    model = torch.nn.Sequential(*layers).to(device_of_ranks())
    zerocore.shard(model, stage, units=[torch.nn.Linear])
    opt = OPTIMIZERS["sgd"](model.parameters())
    losses = []
    for step in range(12):
        model[1].fails = step % 2 == 1
        torch.manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(4, 16)).square().mean()
        if model[1].fails:
            with pytest.raises(ArithmeticError):
                loss.backward()
        else:
            loss.backward()
            opt.step()
        opt.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu(), {}, on_host(zerocore.full_state_dict(model))


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_after_a_backward_that_failed(both, stage):
    assert_bits(both(2, failing, stage))


def communication(stage):
    model = build("transformer", stage)
    opt = OPTIMIZERS["sgd"](model.parameters())
    sharded_step(model, opt, 0)
    zerocore.stats(model).reset()
    sharded_step(model, opt, 1)
    collectives = zerocore.stats(model).collectives
    return {kind: traffic.elements for kind, traffic in collectives.items()}


@pytest.mark.parametrize("stage", STAGES)
def test_the_same_collectives_are_counted(both, stage):
    cpu, device = both(2, communication, stage)
    assert device == cpu and device[0]


def example(stage, precision):
    """Losses of 20 steps of the example's model on bytes of its own source."""
    torch.manual_seed(0)
    model = GPT(layers=3, dim=32, heads=2, seq=32)
    zerocore.shard(model, stage, units=[Block], mixed_precision=precision)
    opt = zerocore.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
    text = torch.tensor(list(EXAMPLE.read_bytes()))
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(20):
        starts = torch.randint(len(text) - 33, (4,), generator=generator)
        part = torch.stack([text[i : i + 33] for i in starts]).to(device_of_ranks())
        with sdpa_kernel(SDPBackend.MATH):
            logits = model(part[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_example_learns_as_on_the_cpu(both, devices, stage, precision):
    # Where the step is made of torch's operators, its last bits are others, and bf16 shows it.
    has_kernels = devices.options["backend"] == "nccl"
    tolerance = 1e-6 if has_kernels or precision is None else 1e-2
    cpu, device = both(2, example, stage, precision)
    for expected, found in zip(cpu, device, strict=True):
        assert expected[-1] < 0.8 * expected[0]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


class TwoDtypes(torch.nn.Module):
    """Parameters of two dtypes and a frozen one, in one unit."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 4).bfloat16()
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        return self.second(self.first(x).bfloat16()).float()


def two_dtypes(stage):
    torch.manual_seed(0)
    model = zerocore.shard(TwoDtypes().to(device_of_ranks()), stage)
    opt = OPTIMIZERS["sgd"](model.parameters())
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        opt.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()  # the input is moved
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu(), {}, on_host(zerocore.full_state_dict(model))


@pytest.mark.parametrize("stage", STAGES)
def test_two_dtypes_in_a_unit(both, stage):
    assert_bits(both(2, two_dtypes, stage))


def launches(stage):
    """Collectives of a step, in their launches, with the times of each on the device."""
    model = build("transformer", stage)
    opt = OPTIMIZERS["sgd"](model.parameters())
    sharded_step(model, opt, 0)
    stats = zerocore.stats(model)
    stats.time_launches()
    stats.reset()
    sharded_step(model, opt, 1)
    torch.accelerator.synchronize()
    records = [record for record in stats.log if record.event == "launch"]
    stats.time_launches(False)
    assert all(r.device_times is None for r in stats.log)
    return [(r.kind, r.unit, r.device_times) for r in records]


@pytest.mark.parametrize("stage", [2, 3])
def test_launches_are_timed(devices, stage):
    for records in devices(2, launches, stage):
        assert {kind for kind, _, _ in records} == {"all_gather", "reduce"}
        for _, unit, (begin, end) in records:
            assert 0 <= begin <= end, unit
        # A small model: the gathers before the forward are one launch, and so are the reductions.
        assert len({times for kind, _, times in records if kind == "reduce"}) == 1
        assert len({times for kind, _, times in records if kind == "all_gather"}) <= 2
