"""Predicted bytes on fake NPUs."""

import pytest
from device_ledger import *  # noqa: F403


@pytest.fixture(scope="session")
def devices(npus):
    return npus
