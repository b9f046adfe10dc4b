"""Ranks that part where no host waits for the others: it waits for its device, which does."""

import contextlib
import re
import sys
import time

import torch
import torch.distributed as dist
from device_training import batch, build, loss_of
from ranks import Pool

TIMEOUT = 6.0
SLACK_SECONDS = 10.0  # of a loaded machine


def evaluates_alone(stage):
    """Rank 0 wants the loss of a batch; rank 1 comes later. What they raise, and when."""
    model = build("transformer", stage, timeout=TIMEOUT)
    part = batch("transformer", 0)
    loss_of(model, part).backward()
    torch.accelerator.synchronize()
    start = time.monotonic()
    try:
        if dist.get_rank() == 1:
            time.sleep(TIMEOUT + 4)
        with torch.no_grad():
            loss_of(model, part).item()
            loss_of(model, part)
    except dist.DistBackendError as error:
        print(f"rank {dist.get_rank()} raised {error}", file=sys.stderr, flush=True)
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


@contextlib.contextmanager
def parting(devices):
    """Ranks of their own, which do not communicate any more afterwards."""
    pool = Pool(2, **devices.options)
    try:
        yield pool
    finally:
        pool.close()


VERDICT = (
    r"rank 1 is alive but does not take part: it has done nothing for .*, while rank 0 waits for "
    r"the all-gather of (the root unit|unit '.*') in forward 2 "
)


def test_a_device_that_waits_is_told_why(devices, frees_its_device, capfd):
    with parting(devices) as pool:
        first, _ = pool.outcomes(evaluates_alone, 3)
    said = capfd.readouterr().err
    assert re.search(f"rank 1 raised zerocore: {VERDICT}", said), said
    if frees_its_device:
        assert first.kind == "returned", first.value
        assert re.search(VERDICT, first.value[0]), first.value[0]
        assert first.value[1] < TIMEOUT + SLACK_SECONDS
    else:
        assert (first.kind, first.value) == ("died", 1), first
        assert re.search(f"^zerocore: {VERDICT}", said, re.MULTILINE), said
        assert first.seconds < TIMEOUT + SLACK_SECONDS


def slow(stage):
    """Rank 1 takes its time, but not too long."""
    model = build("transformer", stage, timeout=TIMEOUT)
    for number in range(2):
        if dist.get_rank() == 1:
            time.sleep(0.4 * TIMEOUT)
        loss_of(model, batch("transformer", number)).backward()
        torch.accelerator.synchronize()
    return True


def test_a_slow_rank_is_waited_for(devices):
    with parting(devices) as pool:
        assert all(pool.run(slow, 3))
