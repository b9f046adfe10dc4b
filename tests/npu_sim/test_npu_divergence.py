"""Ranks that part, on fake NPUs."""

import pytest
from device_divergence import *  # noqa: F403


@pytest.fixture(scope="session")
def devices(npus):
    return npus


@pytest.fixture
def frees_its_device():
    """Nothing that a process group of torch_npu offers ends what its device waits in."""
    return False
