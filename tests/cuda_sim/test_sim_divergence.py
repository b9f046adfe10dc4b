"""Ranks that part, on simulated GPUs."""

import pytest
from device_divergence import *  # noqa: F403


@pytest.fixture(scope="session")
def devices(gpus):
    return gpus


@pytest.fixture
def frees_its_device():
    """NCCL's communicators can be aborted."""
    return True
