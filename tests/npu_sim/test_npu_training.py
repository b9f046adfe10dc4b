"""Training on fake NPUs: the tests of every device, and those of NPUs alone."""

import models
import pytest
import torch
from device_training import *  # noqa: F403
from device_training import OPTIMIZERS, STAGES, assert_bits, batch, device_of_ranks, loss_of, train
from device_waits import *  # noqa: F403

import zerocore


@pytest.fixture(scope="session")
def devices(npus):
    return npus


def waits_of_a_step(stage, optimizer):
    """What the host waits for in a step of a plain model, and in one of a sharded model."""
    import torch_npu

    found = []
    for is_sharded in (False, True):
        model = models.build("transformer").to(device_of_ranks())
        if is_sharded:
            zerocore.shard(model, stage, units=models.BLOCKS)
        opt = OPTIMIZERS[optimizer if is_sharded else "sgd"](model.parameters())
        parts = [batch("transformer", step) for step in range(4)]
        for step, part in enumerate(parts):
            if step == 2:
                torch_npu._C.take_waits()
            opt.zero_grad()
            loss_of(model, part).backward()
            if is_sharded:
                zerocore.clip_grad_norm_(model, 1.0)
            opt.step()
        found.append(torch_npu._C.take_waits())
    return found


@pytest.mark.parametrize("optimizer", ["zerocore", "sgd"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_host_never_waits_in_a_step(npus, stage, optimizer):
    for plain, ours in npus(2, waits_of_a_step, stage, optimizer):
        assert ours == plain


def parameters_on_one_device():
    """All ranks have put their model on the first device."""
    before = torch.accelerator.current_device_index()
    model = models.build("transformer").to("npu:0")
    with pytest.raises(ValueError) as error:
        zerocore.shard(model)
    assert torch.accelerator.current_device_index() == before
    return str(error.value)


def test_a_model_on_another_ranks_device_is_refused(npus):
    first, second = npus(2, parameters_on_one_device)
    text = "expected npu:1, the current device of this rank, got npu:0; call torch.npu.set_device"
    assert text in second
    assert text in first and "rank 1" in first


def train_in_registered_windows():
    """As `train`; the windows are memory of the process group, kept from step to step."""
    if device_of_ranks().type == "cpu":
        return train("transformer", 3, "adamw")
    import torch_npu

    before = torch_npu._C.allocated_by_groups()
    report = train("transformer", 3, "adamw", register_windows=True)
    units = len(models.JOBS["transformer"].units) + 1
    assert 0 < torch_npu._C.allocated_by_groups() - before <= units
    return report


def test_windows_from_the_process_group(both):
    assert_bits(both(2, train_in_registered_windows))
