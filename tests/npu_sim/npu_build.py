"""Compiles the fake NPU, and says how to run a process that has it: python npu_build.py"""

import fcntl
import functools
import os
import pathlib
import subprocess
import sys

import torch

HERE = pathlib.Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "build/npu_sim" / torch.__version__
LIBRARY = FOLDER / "_C.so"
DEVICES = 4


def environment(schedule: str) -> dict[str, str]:
    """Variables of a process with fake NPUs, which are compiled if they are not yet."""
    _compiled()
    return {
        "NPU_SIM_LIBRARY": str(LIBRARY),
        "NPU_SIM_DEVICES": str(DEVICES),
        "NPU_SIM_SCHEDULE": schedule,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE / "fake"), os.environ.get("PYTHONPATH", "")]),
    }


@functools.cache
def _compiled() -> None:
    """Compiles in another process: loading the library would give this one the device."""
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])  # ninja
    result = subprocess.run(
        [sys.executable, __file__, "compile"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise RuntimeError(f"npu_sim does not compile:\n{result.stdout}{result.stderr}")


def _compile() -> None:
    from torch.utils.cpp_extension import load

    sources = sorted((HERE / "csrc").glob("*.cpp"))
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "one_at_a_time", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        inputs = [*sources, *(HERE / "csrc").glob("*.h"), pathlib.Path(__file__)]
        newest = max(path.stat().st_mtime for path in inputs)
        if LIBRARY.exists() and LIBRARY.stat().st_mtime > newest:
            return
        (FOLDER / "lock").unlink(missing_ok=True)  # load's own, of a build that was killed
        load(
            "_C",
            [str(path) for path in sources],
            extra_cflags=["-O1", "-std=c++20", "-Wall", "-Wextra"],
            build_directory=str(FOLDER),
            is_python_module=False,
            verbose=True,
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        _compile()
    else:
        print(*(f"{name}={value}" for name, value in environment("late").items()))
