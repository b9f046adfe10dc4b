"""Fixtures of the tests on fake NPUs."""

import npu_build
import pytest
import torch
from ranks import Ranks


@pytest.fixture(scope="session", params=["late", "early"])
def npus(request):
    """`npus(size, case, *args)` runs a case on that many ranks with a fake NPU and hccl each.

    Every test runs under both schedules of the device: neither finds all missing waits.
    """
    if torch.version.cuda is not None:
        pytest.skip("the fake NPU needs a torch without CUDA, whose kernels it would compete with")
    pools = Ranks(backend="hccl", env=npu_build.environment(request.param))
    yield pools
    pools.close()


# Under both schedules: what a schedule could change. The rest is as it is on every device.
BOTH = ("test_training_is", "test_the_example", "test_every_wait", "test_windows", "test_launches")


def pytest_collection_modifyitems(config, items):
    late = [
        item
        for item in items
        if "[early" not in item.name
        or "test_npu_training" not in item.nodeid
        or item.name.startswith(BOTH)
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in late])
    items[:] = late
