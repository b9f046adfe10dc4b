"""Kernels on the CPU: barriers, orders of threads, and the races that ThreadSanitizer finds."""

import subprocess
from pathlib import Path

import cuda_sim_build as build
import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """emulation.cpp with both engines."""
    folder = tmp_path_factory.mktemp("emulation")
    command = ["g++", "-std=c++20", "-O1", "-g", "-pthread", f"-I{HERE / 'include'}"]
    command += ["-isystem", str(build.cuda_include()), str(HERE / "emulation" / "emulation.cpp")]
    command += ["-ldl", "-o"]
    threads = ["-DCUEMU_THREADS", "-fsanitize=thread"]
    build.run_all([[*command, f"{folder}/fibers"], [*command, f"{folder}/threads", *threads]])
    return folder


@pytest.mark.parametrize(
    ("engine", "kernel", "expected"),
    [
        ("fibers", "sum", "0 of 3 orders"),
        ("fibers", "missing_barrier", "2 of 3 orders"),
        ("fibers", "divergent", "deadlock"),
        ("threads", "sum", "0 of 3 orders"),
        ("threads", "missing_barrier", "ThreadSanitizer: data race"),
    ],
)
def test_engine(programs, engine, kernel, expected):
    done = subprocess.run([programs / engine, kernel], capture_output=True, text=True, timeout=60)
    assert expected in done.stdout + done.stderr
    assert (done.returncode == 0) == (kernel == "sum")
