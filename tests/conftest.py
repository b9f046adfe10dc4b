"""Fixtures of all tests."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks

import pytest
import torch
from ranks import Ranks

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks():
    """`ranks(size, case, *args)` runs a case on that many gloo ranks; see ranks.py."""
    pools = Ranks()
    yield pools
    pools.close()
