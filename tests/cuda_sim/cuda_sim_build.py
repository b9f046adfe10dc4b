"""Builds the simulator's libraries and the CPU twins of CUDA kernels.

Needs g++ 12 or later, the CUDA headers (of the toolkit, else those in the wheels that torch depends
on) and a CUDA build of torch. What is newer than all its sources is left as it is.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import twin

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OUT = ROOT / "build" / f"cuda_sim-{torch.__version__}"
TORCH = Path(torch.__file__).parent
WHEELS = TORCH.parent / "nvidia"

WARNINGS = ["-Wall", "-Wextra", *(["-Werror"] if os.environ.get("ZEROCORE_WERROR") == "1" else [])]
CXX = ["g++", "-std=c++20", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", f"-I{HERE / 'include'}"]


def cuda_include() -> Path:
    """The folder of the CUDA headers."""
    candidates = [WHEELS / f"cu{str(torch.version.cuda).split('.')[0]}"]
    if nvcc := shutil.which("nvcc"):  # maybe a wrapper: it says itself where it lives
        command = [nvcc, "-dryrun", "-x", "cu", os.devnull]
        output = subprocess.run(command, capture_output=True, text=True).stderr
        if here := re.search(r"^#\$ _HERE_=(.+)$", output, re.MULTILINE):
            candidates.insert(0, Path(here[1].strip()).parent)
    if home := os.environ.get("CUDA_HOME"):
        candidates.insert(0, Path(home))
    for folder in candidates:
        if (folder / "include" / "cuda_runtime_api.h").exists():
            return folder / "include"
    raise RuntimeError(
        f"expected CUDA headers in {' or '.join(map(str, candidates))}, got none; set CUDA_HOME"
    )


def is_stale(product: Path, sources: Iterable[Path]) -> bool:
    """Whether `product` does not exist or is older than one of its sources."""
    built = product.stat().st_mtime if product.exists() else -1.0
    return any(source.stat().st_mtime >= built for source in sources)


def run_all(commands: Sequence[list[str]]) -> None:
    """Runs the commands, as many at once as there are cores."""

    def run(command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")

    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, commands))


def library(output: Path, folder: str, includes: list[Path], links: list[str]) -> None:
    """Compiles the sources in `folder` and links them as `output`."""
    sources = [path for path in sorted((HERE / folder).iterdir()) if path.suffix in (".c", ".cpp")]
    system = [word for path in includes for word in ("-isystem", str(path))]
    with tempfile.TemporaryDirectory() as objects:
        commands, products = [], []
        for source in sources:
            compiler = ["gcc", "-O2", "-fPIC"] if source.suffix == ".c" else [*CXX, *system]
            products.append(f"{objects}/{source.name}.o")
            commands.append([*compiler, *WARNINGS, "-c", str(source), "-o", products[-1]])
        run_all(commands)
        # A fresh file and a rename: processes that run with the old library keep it.
        fresh = f"{objects}/{output.name}"
        soname = f"-Wl,-soname,{output.name}"
        run_all([["g++", "-shared", *products, "-o", fresh, soname, "-Wl,-z,defs", *links]])
        shutil.copy(fresh, f"{output}.new")
        os.replace(f"{output}.new", output)


def build_simulator(out: Path) -> None:
    """Puts the fake libraries and that of torch's operators into `out`."""
    sources = [path for path in HERE.rglob("*") if path.suffix in (".c", ".cpp", ".h", ".map")]
    names = ("libcudart.so.13", "libcuda.so.1", "libnccl.so.2", "libcuda_sim_ops.so")
    if not any(is_stale(out / name, [Path(__file__), *sources]) for name in names):
        return
    out.mkdir(parents=True, exist_ok=True)
    cuda = cuda_include()
    symbols = f"-Wl,--version-script={HERE / 'runtime' / 'cudart.map'}"
    library(out / names[0], "runtime", [cuda], [symbols, "-ldl", "-lpthread"])
    runtime = [f"-L{out}", "-l:libcudart.so.13", "-ldl", "-lpthread"]
    library(out / names[1], "driver", [], [])
    library(out / names[2], "nccl", [cuda, WHEELS / "nccl" / "include"], runtime)
    headers = [TORCH / "include", TORCH / "include" / "torch" / "csrc" / "api" / "include", cuda]
    torch_libraries = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", "-lc10_cuda"]
    library(out / names[3], "ops", headers, [*torch_libraries, *runtime])


def build_twins(output: Path, sources: Sequence[Path], includes: Sequence[Path] = ()) -> None:
    """Makes a library of the CPU twins of the kernels in `sources`.

    Args:
        output: the library; the processes that run the kernels name it in CUDA_SIM_TWINS.
        sources: .cu files.
        includes: where their headers are, beside their own folders.
    """
    headers = [h for folder in includes for h in folder.rglob("*") if h.suffix in (".h", ".cuh")]
    own = [HERE / "twin.py", *(HERE / "include").iterdir()]
    if not is_stale(output, [*sources, *headers, *own]):
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    flags = ["-Wno-unknown-pragmas", "-Wno-attributes", "-pthread"]
    # A fused multiplication and addition rounds once where nvcc's code, which the product builds
    # with -fmad=false, rounds twice.
    flags += ["-ffp-contract=off", *(f"-I{path}" for path in includes)]
    flags += ["-isystem", str(cuda_include())]
    with tempfile.TemporaryDirectory() as folder:
        commands, objects = [], []
        for number, source in enumerate(sources):
            copy = twin.write_rewritten(source, Path(folder) / str(number))
            objects.append(f"{copy}.o")
            compiler = [flag for flag in CXX if flag != "-fvisibility=hidden"]
            command = [*compiler, *flags, f"-I{source.parent}", "-c", str(copy)]
            commands.append([*command, "-o", objects[-1]])
        run_all(commands)
        run_all([["g++", "-shared", "-pthread", *objects, "-o", f"{output}.new", "-ldl"]])
        os.replace(f"{output}.new", output)


def build_all() -> list[Path]:
    """Builds the simulator and the twins of all kernels into OUT; the libraries of the twins."""
    build_simulator(OUT)
    emulated, product = OUT / "twins_emulation.so", OUT / "twins_zerocore.so"
    build_twins(emulated, [HERE / "emulation" / "kernels.cu"])
    sources = sorted((ROOT / "csrc" / "kernels" / "cuda").glob("*.cu"))
    build_twins(product, sources, [ROOT / "csrc"])
    return [emulated, product]
