"""Training on simulated GPUs: the tests of every device, and those of GPUs alone."""

import pytest
from device_training import *  # noqa: F403


@pytest.fixture(scope="session")
def devices(gpus):
    return gpus
