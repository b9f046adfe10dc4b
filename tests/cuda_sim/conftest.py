"""Fixtures of the tests on simulated GPUs. README.md says how the simulator behaves.

How to write a test: a case is a module-level function of a test file (or of a file beside it) that
every rank calls. It sees one simulated GPU per rank, current already, and a default process group
of NCCL; it returns plain values or tensors, which arrive on the CPU.

    def train(stage, steps):
        model = zerocore.shard(Model().cuda(), stage=stage)
        cuda_sim.reset_counters()
        ...
        torch.cuda.synchronize()  # counters are complete only then
        return losses, cuda_sim.counters()["launches"], cuda_sim.nccl_counters()

    def test_training(gpus):
        losses, launches, traffic = gpus(2, train, 3, steps=5)[0]  # a result per rank

The ranks of a size are started once and serve all cases of the session. A case that raises, hangs
or kills its rank fails with the report of all ranks, and the next one gets new ranks. What the
simulator says when it aborts a process is in the captured stderr of the test that started the
ranks; for a test about that, start a `Pool(2, **pool_options)` and read `capfd`.
"""

import shutil
import subprocess
from pathlib import Path

import cuda_sim
import cuda_sim_build as build
import pytest
import torch
from ranks import Ranks

HERE = Path(__file__).resolve().parent
DEVICES = 4  # of the machine that each process sees


@pytest.fixture(scope="session")
def twins():
    """Libraries of the twins of all kernels; builds them and the simulator where they are stale."""
    if torch.version.cuda is None:
        pytest.skip("needs a CUDA build of torch; `make test-cuda-sim` sets it up")
    from zerocore import _C

    if _C.BUILD["cuda"] is None:
        pytest.fail("expected zerocore with CUDA, got a build without: see `make test-cuda-sim`")
    return build.build_all()


def options(twins, schedule):
    env = cuda_sim.environment(build.OUT, twins, schedule, DEVICES)
    env["CUDA_SIM_NCCL_TIMEOUT"] = "60"  # before the limit of a case, and it says who waits
    return {"backend": "nccl", "env": env, "prepare": cuda_sim.enable_cpu_ops}


@pytest.fixture(scope="session")
def pool_options(twins):
    """Arguments of a Pool of ranks on simulated GPUs, lazily scheduled."""
    return options(twins, "lazy")


@pytest.fixture(scope="session")
def gpus(pool_options):
    """`gpus(size, case, *args)` runs a case on that many simulated GPUs, lazily scheduled."""
    pools = Ranks(**pool_options)
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def eager_gpus(twins):
    """The same with work that runs at once, as under CUDA_LAUNCH_BLOCKING=1."""
    pools = Ranks(**options(twins, "eager"))
    yield pools
    pools.close()


@pytest.fixture(params=["lazy", "eager"])
def both_gpus(request):
    """The test runs with `gpus` and with `eager_gpus`."""
    return request.getfixturevalue("gpus" if request.param == "lazy" else "eager_gpus")


@pytest.fixture(scope="session")
def kernels(twins):
    """Path of the library that nvcc makes of emulation/kernels.cu, as a product would."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    source, library = HERE / "emulation" / "kernels.cu", build.OUT / "libkernels.so"
    flags = ["-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", "-arch=sm_90"]
    if build.is_stale(library, [source]):
        subprocess.run([nvcc, *flags, str(source), "-o", str(library)], check=True)
    return str(library)
