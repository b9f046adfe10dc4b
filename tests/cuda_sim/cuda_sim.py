"""The environment in which a process runs on the simulator, and the counters inside such a process.

What a test counts with these: cuda_sim.reset_counters(), then the work, torch.cuda.synchronize(),
and counters() or nccl_counters().
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def environment(
    build: Path, twins: Sequence[Path] = (), schedule: str = "lazy", devices: int = 2
) -> dict[str, str]:
    """What a process needs, beside its own variables, to see fake CUDA devices.

    Args:
        build: the folder that cuda_sim_build.build_simulator filled.
        twins: libraries of kernels for the CPU, from cuda_sim_build.build_twins.
        schedule: "lazy" or "eager"; see README.md.
        devices: how many there are.
    """
    preload = [str(build / name) for name in ("libcudart.so.13", "libnccl.so.2")]
    path = [str(build), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "LD_PRELOAD": ":".join(filter(None, [*preload, os.environ.get("LD_PRELOAD")])),
        "LD_LIBRARY_PATH": ":".join(filter(None, path)),
        "CUDA_SIM_BUILD": str(build),
        "CUDA_SIM_SCHEDULE": schedule,
        "CUDA_SIM_DEVICES": str(devices),
        "CUDA_SIM_TWINS": ":".join(map(str, twins)),
        # Ranks share the cores, and one thread makes the CPU kernels' results reproducible.
        "OMP_NUM_THREADS": "1",
    }


def is_lazy() -> bool:
    """Whether work runs only when something demands it."""
    return os.environ["CUDA_SIM_SCHEDULE"] == "lazy"


def enable_cpu_ops() -> None:
    """Makes torch's own operators run on fake CUDA tensors. Once, before their first use."""
    import torch

    torch.ops.load_library(os.path.join(os.environ["CUDA_SIM_BUILD"], "libcuda_sim_ops.so"))


def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(name)  # LD_PRELOAD brought it, under the name it stands in for


def _json(name: str, function: str) -> dict[str, Any]:
    read = getattr(_library(name), function)
    read.restype = ctypes.c_char_p
    return json.loads(read().decode())


def counters() -> dict[str, Any]:
    """Launches and operators by name, copied bytes by direction, memory by device, waits."""
    return _json("libcudart.so.13", "cuda_sim_counters")


def nccl_counters() -> dict[str, dict[str, int]]:
    """Calls and bytes of collectives, by kind."""
    return _json("libnccl.so.2", "cuda_sim_nccl_counters")


def reset_counters() -> None:
    """Sets all counters to zero, and the peaks of memory to what is allocated now."""
    _library("libcudart.so.13").cuda_sim_reset_counters()
    _library("libnccl.so.2").cuda_sim_reset_nccl_counters()


def pending() -> int:
    """Enqueued tasks that have not run. Always 0 under the eager schedule."""
    return _library("libcudart.so.13").cuda_sim_pending()
