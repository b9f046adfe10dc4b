"""The waits between streams: each is needed, and they are enough. See device_training.py."""

import math

import pytest
import torch
import torch.distributed as dist
from device_training import OPTIMIZERS, batch, build, device_of_ranks, loss_of, on_host
from ranks import RankError, Ranks

import zerocore
from zerocore import _C, policy, registry


# [Note: waits] Each wait between streams is left out in turn: some variant of a training must then
# go wrong. A simulated device runs enqueued work late, when something demands it; so a variant says
# what is demanded first, before anything that it has to wait for has run by itself.
class Pyramid(torch.nn.Module):
    """Units of different sizes, and some of the same."""

    def __init__(self):
        super().__init__()
        widths = [8, 40, 16, 72, 24, 56, 24, 24, 24, 24, 24, 8]
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)
        )

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Branches(torch.nn.Module):
    """Two units, of which one computes on a stream of its own."""

    def __init__(self):
        super().__init__()
        self.one, self.other = torch.nn.Linear(8, 32), torch.nn.Linear(8, 32)
        self.side = torch.Stream(device_of_ranks())
        self.alive = []  # what one stream made and the other reads

    def forward(self, x):
        main = torch.accelerator.current_stream()
        self.side.wait_stream(main)
        with self.side:
            other = self.other(x)
        one = self.one(x)  # the other's window is given back for it
        self.alive += [x, other]
        # As large as that window, and enough to be given its memory, if it can be had.
        junk = [torch.full((288,), math.nan, device=x.device) for _ in range(100)]
        main.wait_stream(self.side)
        del junk
        return one + other


def small(kind, stage=3):
    torch.manual_seed(0)
    return zerocore.shard(kind().to(device_of_ranks()), stage, units=[torch.nn.Linear])


def pyramid():
    return small(Pyramid)


def resident():
    return small(Pyramid, stage=2)


def branches():
    return small(Branches)


def transformer():
    return build("transformer", 3)


def loss_of_variant(model, step):
    if isinstance(model, Pyramid | Branches):
        torch.manual_seed(10 * step + dist.get_rank())
        return model(torch.randn(4, 8)).square().mean()
    return loss_of(model, batch("transformer", step))


def variant(make, first, launch_bytes):
    """A training whose streams are made to run in an order: `first` is gather, reduce or None."""
    before, policy.LAUNCH_BYTES = policy.LAUNCH_BYTES, launch_bytes
    try:
        model = make()
    finally:
        policy.LAUNCH_BYTES = before
    gather, reduce = (
        torch.Stream(stream_id=stream, device_index=index, device_type=kind)
        for stream, index, kind in registry.require_sharded(model, "test")[0].core.streams()
    )
    run_first = {"gather": gather.synchronize, "reduce": reduce.synchronize}.get(first, int)
    opt = OPTIMIZERS["adamw"](model.parameters())
    losses = []
    for step in range(3):
        opt.zero_grad()
        loss = loss_of_variant(model, step)
        run_first()
        loss.backward()
        run_first()
        opt.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu(), on_host(zerocore.full_state_dict(model))


STREAMS = (None, "gather", "reduce")
# One launch for each unit, so that there are many; and one for all.
VARIANTS = [(make, first, 1) for make in (transformer, pyramid) for first in STREAMS]
VARIANTS.append((transformer, None, 2**22))
VARIANTS.append((resident, "gather", 1))
VARIANTS.append((branches, "gather", 1))


def variants(left_out=None):
    """Results of all variants, without one kind of wait."""
    if left_out is not None:
        _C.leave_out_wait(_C.WAITS[left_out], True)
    try:
        return [variant(*which) for which in VARIANTS]
    finally:
        if left_out is not None:
            _C.leave_out_wait(_C.WAITS[left_out], False)
        torch.accelerator.synchronize()


def is_same(one, other):
    (losses, state), (other_losses, other_state) = one, other
    return torch.equal(losses, other_losses) and all(
        torch.equal(state[name], other_state[name]) for name in state
    )


@pytest.fixture
def may_hide():
    """Waits that this kind of device does not show to be needed."""
    return ()


@pytest.fixture(scope="module")
def right_variants(devices):
    """What the variants give with all waits."""
    return devices(2, variants)


def test_launches_and_orders_change_no_bits(right_variants):
    for results in right_variants:
        for make in (transformer, pyramid):
            same = [r for r, v in zip(results, VARIANTS, strict=True) if v[0] is make]
            assert all(is_same(r, same[0]) for r in same)


@pytest.fixture(scope="module")
def careless_devices(devices):
    """Ranks of their own: without a wait memory that is gone may be touched, and other cases that
    ran in the same processes later would suffer for it."""
    pools = Ranks(**devices.options)
    yield pools
    pools.close()


@pytest.mark.parametrize("wait", _C.WAITS)
def test_every_wait_between_streams_is_needed(careless_devices, right_variants, may_hide, wait):
    careless_devices(2, dist.get_rank)  # they have started: what fails now is the case
    try:
        reports = careless_devices(2, variants, wait)
    except RankError:
        return  # memory that is gone was touched, or NaN came out
    same = [list(map(is_same, *pair)) for pair in zip(reports, right_variants, strict=True)]
    assert not all(map(all, same)) or wait in may_hide, f"nothing went wrong without {wait!r}"
