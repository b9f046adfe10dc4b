"""Predicted bytes on simulated GPUs."""

import pytest
from device_ledger import *  # noqa: F403


@pytest.fixture(scope="session")
def devices(gpus):
    return gpus
