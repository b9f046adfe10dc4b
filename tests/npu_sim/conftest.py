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
