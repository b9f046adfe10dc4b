"""Predicted bytes on devices, beside what the device's own allocator says."""

import pytest
import torch
from device_training import device_of_ranks
from torch import nn

import zerocore
from zerocore.planner import live
from zerocore.planner.activity import trace_step
from zerocore.planner.peak import peak_of
from zerocore.planner.schedule import rehearse
from zerocore.planner.sizes import ModelSizes
from zerocore.units import plan_units

WIDTH, TOKENS = 512, 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(6)))


def loss_of(output):
    return output.square().mean()


def memory(stage):
    """Predicted and measured peak of a step, and the ledger after it."""
    device = device_of_ranks()
    # Made on the host and moved by zerocore: nothing else is on the device.
    before = torch.accelerator.memory_allocated()
    sharded = zerocore.shard(model().to(device), stage, units=[Block])
    optimizer = zerocore.AdamW(sharded.parameters())
    x = torch.randn(TOKENS, WIDTH, device=device)
    for _ in range(3):
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        loss_of(sharded(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.accelerator.synchronize()
    measured = torch.accelerator.max_memory_allocated() - before - x.nbytes
    plain = model()
    activity = trace_step(
        plain,
        plan_units(plain, [Block]),
        lambda: ((torch.empty(TOKENS, WIDTH),), {}),
        loss=loss_of,
    )
    sizes = ModelSizes.of(plain, [Block])
    setting = live.setting_of(zerocore.registry.sharded_as(sharded))
    peak = peak_of(sizes, setting, rehearse(sizes, setting, activity.calls), activity)
    return peak.bytes, measured, zerocore.ledger(sharded, optimizer)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_predicted_peaks(devices, stage):
    for predicted, measured, ledger in devices(2, memory, stage):
        assert abs(predicted / measured - 1) < 0.05, f"{predicted:,} {measured:,}"
        names = [name for name, _ in ledger.outside]
        assert names[0].startswith("kept by zerocore")
        assert names[1].startswith("allocated on") and names[2].startswith("reserved by")
        assert all(size >= 0 for _, size in ledger.outside)
        differs = {line.split()[0] for line in ledger.differences}
        assert differs <= {"gradients"}  # cleared ones are free


def chosen():
    sharded = zerocore.shard(model().to(device_of_ranks()), "auto")
    return zerocore.ledger(sharded).stages[0]


def test_the_stage_is_chosen_by_the_device(devices):
    for text in devices(2, chosen):
        assert text.startswith("stage 0 on 2 ranks (auto: needs ")
