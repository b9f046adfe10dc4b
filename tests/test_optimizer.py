"""zerocore.AdamW behaves as torch.optim.AdamW."""

import copy
import pickle

import models
import pytest
import reference
import sharded
import torch
import torch.distributed as dist
from reference import assembled, assert_as_exact, assert_same

import zerocore

JOB = "transformer"
SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(
        o, [lambda n: 1 / (n + 1), lambda n: 0.5**n]
    ),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=8),
}


def grouped(model):
    """Two groups by the rank of the parameters, with other values each."""
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": 0.3},
        {
            "params": [p for _, p in named if p.dim() < 2],
            "weight_decay": 0.0,
            "lr": 3e-2,
            "betas": (0.7, 0.9),
        },
    ]


def make(kind, groups, **options):
    """Either optimizer, with the same arguments."""
    options = {"lr": 1e-2, "eps": reference.EPS} | options
    if kind == "zerocore":
        return zerocore.AdamW(groups, **options)
    options.pop("max_grad_norm", None)
    decoupled = options.pop("decoupled", True)
    return (torch.optim.AdamW if decoupled else torch.optim.Adam)(groups, **options)


def train_plain(dtype, size=2, steps=5, scheduler=None, max_grad_norm=None, **options):
    """The reference with torch.optim, in one process: parameters, and the norms before clipping."""
    model = models.build(JOB).to(dtype)
    opt = make("torch", grouped(model), **options)
    schedule = SCHEDULERS[scheduler](opt) if scheduler else None
    norms = []
    for step in range(steps):
        opt.zero_grad()
        for rank in range(size):
            (models.loss_of(model, models.batch(JOB, rank, step, dtype)) / size).backward()
        limit = float("inf") if max_grad_norm is None else max_grad_norm
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        opt.step()
        if schedule:
            schedule.step()
    return reference.clones(model.state_dict()), norms


def train(stage, kind="zerocore", steps=5, scheduler=None, **options):
    """The same on a rank: parameters, norms and rates."""
    model = sharded.shard(JOB, stage)
    opt = make(kind, grouped(model), **options)
    schedule = SCHEDULERS[scheduler](opt) if scheduler else None
    norms, rates = [], []
    for step in range(steps):
        sharded.step(model, opt, JOB, step)
        if options.get("max_grad_norm") is not None:
            assert opt.grad_norm.dim() == 0
            norms.append(opt.grad_norm.item())
        if schedule:
            schedule.step()
        rates.append([group["lr"] for group in opt.param_groups])
    return reference.clones(zerocore.full_state_dict(model)), norms, rates


VARIANTS = {
    "groups": {},
    "no decoupling": {"decoupled": False},
    "clipping": {"max_grad_norm": 0.05},
    "no clipping needed": {"max_grad_norm": 1e6},
    "lambda": {"scheduler": "lambda"},
    "cosine": {"scheduler": "cosine"},
    "one cycle": {"scheduler": "one cycle"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_error_is_at_most_twice_that_of_torch(ranks, variant):
    options = VARIANTS[variant]
    exact, exact_norms = train_plain(torch.float64, **options)
    ours, _ = train_plain(torch.float32, **options)
    results = [ranks(2, train, stage, **options) for stage in range(4)]
    for reports in results:
        for state, norms, rates in reports:
            assert_same(state, results[0][0][0])
            assert_as_exact(state, ours, exact)
            for norm, expected in zip(norms, exact_norms, strict=bool(norms)):
                assert norm == pytest.approx(expected, rel=1e-5)
            assert rates == results[0][0][2]
    moved = train_plain(torch.float64, steps=5)[0]
    if variant not in ("groups", "no clipping needed"):
        assert any(not torch.allclose(moved[n], exact[n], rtol=1e-4) for n in exact), "no effect"


def follow_schedule(kind):
    """Rates and first betas along a one-cycle schedule."""
    model = sharded.shard(JOB, 3)
    opt = make(kind, grouped(model))
    schedule = SCHEDULERS["one cycle"](opt)
    found = []
    for step in range(4):
        sharded.step(model, opt, JOB, step)
        schedule.step()
        found.append([(group["lr"], group["betas"]) for group in opt.param_groups])
    return found


def test_schedulers_set_the_same_values(ranks):
    assert ranks(2, follow_schedule, "zerocore") == ranks(2, follow_schedule, "torch")


def interface():
    """Facts about the two optimizers on the same model, which must agree."""
    facts = []
    for kind in ("zerocore", "torch"):
        model = sharded.shard(JOB, 3)
        opt = make(kind, grouped(model))
        assert isinstance(opt, torch.optim.Optimizer)
        sharded.step(model, opt, JOB, 0)
        saved = opt.state_dict()
        entries = {
            index: {key: tuple(value.shape) for key, value in entry.items() if key != "step"}
            for index, entry in saved["state"].items()
        }
        steps = {float(entry["step"]) for entry in saved["state"].values()}
        shapes = {
            index: tuple(p.shape)
            for index, p in enumerate(sum((g["params"] for g in opt.param_groups), []))
        }
        assert entries == {
            index: {"exp_avg": shape, "exp_avg_sq": shape} for index, shape in shapes.items()
        }
        groups = [
            {k: g[k] for k in ("lr", "betas", "eps", "weight_decay", "params")}
            for g in saved["param_groups"]
        ]
        facts.append((entries, steps, groups))
    return facts


def test_state_dict_looks_like_that_of_torch(ranks):
    for ours, theirs in ranks(2, interface):
        assert ours == theirs


def restart(stage, source, target, bf16=False):
    """Trains 2 + 3 steps, the last 3 with a `target` that loads the state of `source`."""
    policy = None
    if bf16:
        policy = zerocore.MixedPrecision(torch.bfloat16, output=torch.float32)
    model = sharded.shard(JOB, stage, mixed_precision=policy)
    opt = make(source, grouped(model))
    for step in range(2):
        sharded.step(model, opt, JOB, step)
    if target is not None:
        state = opt.state_dict()
        for group in state["param_groups"]:
            group["lr"] = group["lr"]
        opt = make(target, grouped(model), lr=123.0)  # the loaded groups win
        opt.load_state_dict(state)
    for step in range(2, 5):
        sharded.step(model, opt, JOB, step)
    return reference.clones(zerocore.full_state_dict(model))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_state_dict_round_trip_is_bit_equal(ranks, stage, bf16):
    through = ranks(2, restart, stage, "zerocore", None, bf16)
    again = ranks(2, restart, stage, "zerocore", "zerocore", bf16)
    for a, b in zip(through, again, strict=True):
        assert_same(b, a)


@pytest.mark.parametrize("stage", [0, 3])
def test_states_of_torch_load(ranks, stage):
    exact, _ = train_plain(torch.float64)
    ours, _ = train_plain(torch.float32)
    for source, target in (("torch", "zerocore"), ("zerocore", "torch")):
        for state in ranks(2, restart, stage, source, target):
            assert_as_exact(state, ours, exact)


def unsharded():
    """The optimizer on a plain model of one rank."""
    model = models.build(JOB)
    opt = make("zerocore", grouped(model), max_grad_norm=0.05)
    norms = []
    for step in range(5):
        opt.zero_grad()
        for rank in range(2):
            (models.loss_of(model, models.batch(JOB, rank, step)) / 2).backward()
        opt.step()
        norms.append(opt.grad_norm.item())
    return reference.clones(model.state_dict()), norms


def test_plain_parameters(ranks):
    exact, exact_norms = train_plain(torch.float64, max_grad_norm=0.05)
    ours, _ = train_plain(torch.float32, max_grad_norm=0.05)
    ((state, norms),) = ranks(1, unsharded)
    assert_as_exact(state, ours, exact)
    assert norms == pytest.approx(exact_norms, rel=1e-5)


def closure_and_groups():
    """A step with a closure returns its loss; a group added later trains; set lr takes effect."""
    model = sharded.shard(JOB, 3)
    named = dict(model.named_parameters())
    late = [named["position"]]
    opt = zerocore.AdamW([p for n, p in named.items() if n != "position"], lr=1e-2)
    losses = []

    def closure():
        opt.zero_grad()
        loss = models.loss_of(model, models.batch(JOB, dist.get_rank(), 0))
        loss.backward()
        losses.append(loss.item())
        return loss

    start = reference.clones(zerocore.full_state_dict(model))
    assert opt.step(closure).item() == losses[0]
    first = reference.clones(zerocore.full_state_dict(model))
    opt.add_param_group({"params": late, "lr": 0.5})
    opt.step(closure)
    second = reference.clones(zerocore.full_state_dict(model))
    for group in opt.param_groups:
        group["lr"] = 0.0
    opt.step(closure)
    third = reference.clones(zerocore.full_state_dict(model))
    return start, first, second, third, losses


def test_closures_and_late_groups(ranks):
    for start, first, second, third, losses in ranks(2, closure_and_groups):
        assert len(losses) == 3 and losses[1] < losses[0]
        assert torch.equal(start["position"], first["position"])
        assert (first["position"] - second["position"]).abs().max() > 0.1
        assert_same(third, second)  # lr 0 moves nothing: decay is times lr


def bad_values():
    """Errors of the constructor."""
    model = sharded.shard(JOB, 3)
    messages = []
    for options in (
        {"lr": -1.0},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"max_grad_norm": -1.0},
    ):
        try:
            zerocore.AdamW(model.parameters(), **options)
            messages.append((options, None))
        except ValueError as error:
            messages.append((options, str(error)))
    return messages


def test_bad_values_are_refused(ranks):
    for messages in ranks(1, bad_values):
        for options, message in messages:
            assert message is not None, f"expected a ValueError for {options}"


def non_finite(stage):
    """A step with clipping and an infinite gradient on one rank: the norm, and what moved."""
    model = sharded.shard(JOB, stage)
    opt = make("zerocore", grouped(model), max_grad_norm=1.0)
    sharded.step(model, opt, JOB, 0)
    before = reference.clones(zerocore.full_state_dict(model))
    opt.zero_grad()
    loss = models.loss_of(model, models.batch(JOB, dist.get_rank(), 1))
    (loss * (float("inf") if dist.get_rank() == 1 else 1.0)).backward()
    opt.step()
    after = reference.clones(zerocore.full_state_dict(model))
    return opt.grad_norm.item(), before, after


@pytest.mark.parametrize("stage", [0, 3])
def test_a_non_finite_norm_is_reported_and_changes_nothing(ranks, stage):
    for norm, before, after in ranks(2, non_finite, stage):
        assert not norm < float("inf")
        assert_same(after, before)


def masters():
    """bf16 windows: many small steps add up in the fp32 masters, which bf16 alone would lose."""
    policy = zerocore.MixedPrecision(torch.bfloat16, output=torch.float32)
    model = torch.nn.Linear(3, 3)
    torch.nn.init.ones_(model.weight)
    zerocore.shard(model, 2, mixed_precision=policy)
    opt = zerocore.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    for _ in range(50):
        opt.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        opt.step()
    return zerocore.full_state_dict(model)["weight"].clone(), model(torch.ones(1, 3)).detach()


def test_small_steps_add_up_in_the_masters(ranks):
    for weight, _ in ranks(2, masters):
        torch.testing.assert_close(weight, torch.full((3, 3), 1 - 50e-4), rtol=1e-5, atol=1e-6)


def gradients_and_norm():
    """Gradients before a step, and the norm that the step reports."""
    model = sharded.shard(JOB, 3)
    opt = make("zerocore", grouped(model), max_grad_norm=0.05)
    models.loss_of(model, models.batch(JOB, dist.get_rank(), 0)).backward()
    before = sharded.pieces(model)
    opt.step()
    return before, opt.grad_norm


def test_grad_norm_is_the_global_norm_before_clipping(ranks):
    reports = ranks(3, gradients_and_norm)
    before = assembled([pieces for pieces, _ in reports])
    exact = torch.stack([g.double().norm() for g in before.values()]).norm()
    assert exact > 0.05
    for _, norm in reports:
        assert torch.equal(norm, reports[0][1])
        torch.testing.assert_close(norm.double(), exact, rtol=1e-5, atol=0)


def two_optimizers(stage, kind, dtype=torch.float32):
    """Every other parameter belongs to a second optimizer, whose rate and decay differ."""
    sharding = dist.is_initialized() and stage is not None
    model = sharded.shard(JOB, stage) if sharding else models.build(JOB).to(dtype)
    parameters = list(model.parameters())
    opts = [
        make(kind, parameters[::2], lr=1e-2, weight_decay=0.3),
        make(kind, parameters[1::2], lr=3e-3, weight_decay=0.0),
    ]
    for step in range(3):
        for rank in [dist.get_rank()] if sharding else [0, 1]:
            loss = models.loss_of(model, models.batch(JOB, rank, step, dtype))
            (loss if sharding else loss / 2).backward()
        for opt in opts if step != 1 else opts[:1]:
            opt.step()
        for opt in opts:
            opt.zero_grad()
    return reference.clones(zerocore.full_state_dict(model) if sharding else model.state_dict())


@pytest.mark.parametrize("kind", ["torch", "zerocore"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_two_optimizers_share_a_model(ranks, stage, kind):
    exact = two_optimizers(None, "torch", torch.float64)
    ours = two_optimizers(None, "torch")
    for state in ranks(2, two_optimizers, stage, kind):
        assert_as_exact(state, ours, exact)


def grid():
    """Plain parameters: channels_last, transposed and 0-dim."""
    torch.manual_seed(0)
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(t) for t in (weight, torch.randn(3, 4).t(), torch.tensor(2.0))]


def test_plain_parameters_in_any_memory_order():
    ours, theirs = grid(), grid()
    opts = zerocore.AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for number in range(3):
        for p, q in zip(ours, theirs, strict=True):
            q.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
            p.grad = q.grad.clone()
        for opt in opts:
            opt.step()
    for p, q in zip(ours, theirs, strict=True):
        assert p.stride() == q.stride()
        torch.testing.assert_close(p, q)


def test_copies_and_pickles_go_on():
    for duplicate in (copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))):
        (p,) = [torch.nn.Parameter(torch.ones(3))]
        opt = zerocore.AdamW([p], lr=0.1, max_grad_norm=0.5)
        p.grad = torch.ones(3)
        opt.step()
        other = duplicate(opt)
        assert other.max_grad_norm == 0.5
        (q,) = other.param_groups[0]["params"]
        q.grad = torch.ones(3)
        opt.step()
        other.step()
        assert torch.equal(p, q) and p is not q


def test_options_that_it_does_not_have_are_refused():
    p = torch.nn.Parameter(torch.ones(3))
    for option in ("amsgrad", "maximize", "max_grad_norm"):
        with pytest.raises(ValueError, match=option):
            zerocore.AdamW([{"params": [p], option: 1.0}])
    gaps = torch.nn.Parameter(torch.ones(4, 6)[:, ::2])
    gaps.grad = torch.ones(4, 3)
    with pytest.raises(ValueError, match="fill its memory"):
        zerocore.AdamW([gaps]).step()


def test_a_norm_that_overflows_changes_nothing():
    p = torch.nn.Parameter(torch.ones(4))
    opt = zerocore.AdamW([p], lr=0.1, max_grad_norm=1.0)
    p.grad = torch.full((4,), 2e38)
    opt.step()
    assert opt.skipped.item() == 1.0 and torch.equal(p, torch.ones(4))
