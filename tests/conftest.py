"""Fixtures of all tests."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks

import pytest
import torch
from ranks import Ranks

# Tests that several files take over.
pytest.register_assert_rewrite("device_training", "device_waits")

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks():
    """`ranks(size, case, *args)` runs a case on that many gloo ranks; see ranks.py."""
    pools = Ranks()
    yield pools
    pools.close()


@pytest.fixture(params=["portable", "avx2", "avx512"])
def isa(request):
    """Run the test on every instruction set of the kernels that this machine has."""
    from zerocore import _C

    if request.param not in _C.isas():
        pytest.skip(f"this machine has {', '.join(_C.isas())} only")
    before = _C.isa()
    _C.set_isa(request.param)
    yield request.param
    _C.set_isa(before)


@pytest.fixture
def threads():
    """`threads(n)` sets torch's thread count for the rest of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
