"""Loss scaling: one scale for all ranks, and a step that all of them take or skip."""

import copy

import models
import pytest
import reference
import sharded
import torch
import torch.distributed as dist
from reference import assert_same
from torch.utils._python_dispatch import TorchDispatchMode

import zerocore

JOB = "transformer"
STAGES = [0, 1, 2, 3]
OPTIMIZERS = {
    "zerocore": lambda p: zerocore.AdamW(p, lr=1e-2, eps=reference.EPS),
    "zerocore, clipping": lambda p: zerocore.AdamW(p, 1e-2, eps=reference.EPS, max_grad_norm=0.5),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=reference.EPS, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=reference.EPS, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}
NAME = "blocks.1.fc1.bias"  # smaller than the alignment: on one rank only


def state_of(opt):
    """Everything in the optimizer's state, by position."""
    packed = opt.state_dict()["state"]
    flat = {f"{key} {name}": v for key, state in packed.items() for name, v in state.items()}
    return {k: v.clone() if torch.is_tensor(v) else torch.tensor(v) for k, v in flat.items()}


def run(stage, kind, bad=None, unscale=False, mesh=None, steps=5):
    """Trains; at step `bad` an element of one gradient on the last rank is what `bad` says."""
    model = sharded.shard(JOB, stage, mesh=mesh)
    opt = OPTIMIZERS[kind](model.parameters())
    scaler = zerocore.GradScaler(init_scale=2.0**10, growth_interval=3)
    poison = {}

    def spoil(gradient):
        if not poison or dist.get_rank() < dist.get_world_size() - 1:
            return gradient
        gradient = gradient.clone()
        gradient[-1] = poison["value"]
        return gradient

    model.get_parameter(NAME).register_hook(spoil)
    scales, skips = [], []
    for number in range(steps):
        if bad is not None and number == 2:
            poison["value"] = bad
            before = reference.clones(zerocore.full_state_dict(model)), state_of(opt)
        opt.zero_grad()
        loss = models.loss_of(model, models.batch(JOB, dist.get_rank(), number))
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(opt)
            zerocore.clip_grad_norm_(model, 0.5)
        scaler.step(opt)
        scaler.update()
        scales.append(scaler.get_scale())
        if poison:
            poison.clear()
            after = reference.clones(zerocore.full_state_dict(model)), state_of(opt)
            for old, new in zip(before, after, strict=True):
                assert_same(new, old)
            skips.append(number)
    return scales, skips, reference.clones(zerocore.full_state_dict(model))


def plain(kind, size, steps, clip=False):
    """The same with torch alone, in one process, without scaling."""
    model = models.build(JOB)
    cls = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
    options = {"momentum": 0.9} if kind == "sgd" else {"eps": reference.EPS}
    opt = cls(model.parameters(), lr=1e-2, **options)
    for number in steps:
        opt.zero_grad()
        for rank in range(size):
            (models.loss_of(model, models.batch(JOB, rank, number)) / size).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    return {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_all_ranks_skip_for_one_element_on_one(ranks, kind, bad):
    expected = plain(kind, 2, [0, 1, 3, 4], clip="clipping" in kind)
    for stage in STAGES if bad > 0 else [3]:
        for scales, skips, state in ranks(2, run, stage, kind, bad):
            assert scales == [2.0**10, 2.0**10, 2.0**9, 2.0**9, 2.0**9] and skips == [2]
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_scaling_changes_nothing_but_the_scale(ranks, kind):
    clip = "clipping" in kind
    expected = plain(kind, 2, range(5), clip)
    for stage in STAGES:
        scales, _, state = ranks(2, run, stage, kind)[0]
        assert scales == [2.0**10, 2.0**10, 2.0**11, 2.0**11, 2.0**11]
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["zerocore", "fused", "foreach"])
def test_unscale_then_clip_then_step(ranks, kind):
    expected = plain(kind, 2, [0, 1, 3, 4], clip=True)
    for stage in (0, 3):
        for scales, _, state in ranks(2, run, stage, kind, float("inf"), unscale=True):
            assert scales[2] == 2.0**9
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


def test_hybrid(ranks):
    by_rank = ranks(4, run, 2, "zerocore", float("inf"), mesh=(2, 2))
    assert all(scales[2] == 2.0**9 for scales, _, _ in by_rank)
    for _, _, state in by_rank[1:]:
        assert_same(state, by_rank[0][2])


def count(kind):
    """Agreements on the host and their bytes in a step."""
    model = sharded.shard(JOB, 3)
    opt = OPTIMIZERS[kind](model.parameters())
    scaler = zerocore.GradScaler()
    scaler.scale(models.loss_of(model, models.batch(JOB, dist.get_rank(), 0))).backward()
    with sharded.Collectives() as seen:
        scaler.step(opt)
        scaler.update()
    return seen.names


@pytest.mark.parametrize("kind", ["zerocore", "zerocore, clipping", "fused"])
def test_one_reduction_decides(ranks, kind):
    for names in ranks(2, count, kind):
        assert sorted(names) == ["gloo:recv", "gloo:send"]


def refusals():
    """What torch.amp.GradScaler says to shards, and ours to gradients that cannot be divided."""
    messages = []
    for stage, policy, scaler in (
        (3, None, torch.amp.GradScaler("cpu")),
        (
            3,
            zerocore.MixedPrecision(torch.float16, accumulate=torch.float16),
            zerocore.GradScaler(),
        ),
        (1, None, zerocore.GradScaler()),
    ):
        model = sharded.shard(JOB, stage, mixed_precision=policy)
        opt = torch.optim.AdamW(model.parameters())
        x, target = models.batch(JOB, dist.get_rank(), 0)
        with zerocore.no_sync(model) if stage == 1 else torch.enable_grad():
            loss = models.loss_of(lambda x, m=model: m(x).float(), (x, target))
            scaler.scale(loss).backward()
        try:
            scaler.unscale_(opt)
            messages.append("")
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_right_is_refused(ranks):
    for torchs, narrow, unreduced in ranks(2, refusals):
        assert "use zerocore.GradScaler" in torchs
        assert "accumulate=torch.float32" in narrow
        assert "never reduced" in unreduced


def torchs_at_stage_0():
    """Replicated gradients are whole: torch's own scaler sees what all ranks see."""
    model = sharded.shard(JOB, 0)
    opt = zerocore.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = reference.clones(zerocore.full_state_dict(model))
    loss = models.loss_of(model, models.batch(JOB, dist.get_rank(), 0))
    scaler.scale(loss * (float("inf") if dist.get_rank() == 1 else 1.0)).backward()
    scaler.step(opt)
    scaler.update()
    assert_same(zerocore.full_state_dict(model), before)
    return scaler.get_scale()


def test_torchs_scaler_works_with_replicas(ranks):
    assert ranks(2, torchs_at_stage_0) == [2.0, 2.0]


def test_is_torchs_without_shards():
    """On plain parameters: torch's scaler and ours, torch's AdamW and ours, step alike."""
    finals = []
    for scaler_class in (torch.amp.GradScaler, zerocore.GradScaler):
        for make in (OPTIMIZERS["zerocore"], OPTIMIZERS["fused"]):
            model = models.build(JOB)
            opt = make(model.parameters())
            scaler = scaler_class("cpu", init_scale=2.0**8)
            for number in range(4):
                opt.zero_grad()
                loss = models.loss_of(model, models.batch(JOB, 0, number))
                scaler.scale(loss * (float("inf") if number == 1 else 1.0)).backward()
                scaler.step(opt)
                scaler.update()
            assert scaler.get_scale() == 2.0**7
            saved = copy.deepcopy(scaler.state_dict())
            scaler.load_state_dict(saved)
            finals.append(list(model.parameters()))
    for final in finals[1:]:
        for one, other in zip(finals[0], final, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


class NoSynchronisation(TorchDispatchMode):
    """Fails where the host reads a tensor's value."""

    READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Passes everything else on."""
        assert func.__name__.split(".")[0] not in self.READS, f"the host waits for {func}"
        return func(*args, **kwargs or {})


def steps_watched(stage, precision):
    """Steps with loss scaling and clipping, in which the host reads nothing."""
    policy = zerocore.MixedPrecision(precision) if precision else None
    model = sharded.shard(JOB, stage, mixed_precision=policy)
    opt = zerocore.AdamW(model.parameters(), max_grad_norm=1.0)
    scaler = zerocore.GradScaler(init_scale=2.0**8)
    for number in range(3):
        opt.zero_grad()
        x, target = models.batch(JOB, dist.get_rank(), number)
        loss = models.loss_of(lambda x: model(x).float(), (x, target))
        scaler.scale(loss).backward()
        with NoSynchronisation():
            scaler.step(opt)
            scaler.update()
    return scaler.get_scale()


@pytest.mark.parametrize("precision", [None, torch.float16])
def test_the_host_waits_for_no_value(ranks, precision):
    for stage in STAGES:
        assert ranks(2, steps_watched, stage, precision) == [2.0**8] * 2
