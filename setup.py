"""Builds the extension module `zerocore._C`; all else about the package is in pyproject.toml.

CUDA is compiled in where torch is a CUDA build and a CUDA toolkit is found, whether or not this
machine has a GPU. Environment variables (a value that is not listed stops the build):
    ZEROCORE_CUDA=auto|0|1   CUDA: if it can be built, never, or an error that says what is missing
    ZEROCORE_WERROR=0|1      1 turns compiler warnings into errors
    DEBUG=0|1                1 builds without optimisation, with symbols and library assertions
    CUDA_HOME                the toolkit; unset, it is the one that nvcc on PATH belongs to
    TORCH_CUDA_ARCH_LIST     architectures of the CUDA kernels; unset, CUDA_ARCHS below
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from setuptools import Extension, setup
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent
SOURCES = ("csrc/*.cpp", "csrc/kernels/*.cpp", "csrc/ops/*.cpp", "csrc/runtime/*.cpp")
CUDA_ONLY = ("csrc/kernels/cuda/*.cu", "csrc/ops/cuda*.cpp")
CUDA_ARCHS = "8.0;9.0;10.0+PTX"  # binary code for these generations, and PTX for later ones


def env_choice(name: str, choices: tuple[str, ...]) -> str:
    """The value of environment variable `name`; unset or empty means the first of `choices`."""
    value = os.environ.get(name) or choices[0]
    if value not in choices:
        raise SystemExit(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    return value


DEBUG = env_choice("DEBUG", ("0", "1")) == "1"
WERROR = env_choice("ZEROCORE_WERROR", ("0", "1")) == "1"


def find_toolkit() -> Path | None:
    """The folder of the CUDA toolkit, or what should be it by CUDA_HOME; None without a hint."""
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return Path(home)
    if nvcc := shutil.which("nvcc"):
        # It may be a wrapper that lives elsewhere, but it says where it runs from.
        command = [nvcc, "-dryrun", "-x", "cu", os.devnull]
        output = subprocess.run(command, capture_output=True, text=True).stderr
        here = re.search(r"^#\$ _HERE_=(.+)$", output, re.MULTILINE)
        return (Path(here[1].strip()) if here else Path(nvcc).resolve().parent).parent
    default = Path("/usr/local/cuda")
    return default if default.exists() else None


def cuda_toolkit() -> Path | None:
    """The toolkit to build CUDA with; None for a CPU build. It never asks whether a GPU is here."""
    choice = env_choice("ZEROCORE_CUDA", ("auto", "0", "1"))
    if choice == "0":
        return None
    toolkit = find_toolkit()
    missing = ""
    if not torch.version.cuda:
        missing = f"a CUDA build of torch, got torch {torch.__version__}"
    elif toolkit is None:
        missing = "a CUDA toolkit, got none by CUDA_HOME, by nvcc on PATH or in /usr/local/cuda"
    else:
        wanted = [toolkit / "bin" / "nvcc", toolkit / "include" / "cuda_runtime.h"]
        if absent := [str(path) for path in wanted if not path.exists()]:
            missing = f"a CUDA toolkit in {toolkit}, got no {' and no '.join(absent)}"
    if missing and choice == "1":
        raise SystemExit(
            f"ZEROCORE_CUDA=1: expected {missing}. Install it or set CUDA_HOME, "
            "or unset ZEROCORE_CUDA to build for the CPU."
        )
    if missing:
        print(f"zerocore: building without CUDA, which wants {missing}", file=sys.stderr)
    return None if missing else toolkit


def system_includes(toolkit: Path | None) -> list[str]:
    """Flags for the headers of torch and of what it stands on: their warnings are not ours."""
    paths = [Path(path) for path in cpp_extension.include_paths("cuda" if toolkit else "cpu")]
    if toolkit:
        # torch's headers include some (cusparse, cublas, nccl) that a small toolkit does not have,
        # but the wheels that torch depends on do.
        paths += sorted(Path(torch.__file__).parents[1].glob("nvidia/*/include"))
    return [word for path in paths for word in ("-isystem", str(path))]


def cxx_flags() -> list[str]:
    """Flags of the C++ sources. The C++ standard is the one torch adds: its headers need it."""
    flags = [
        "-fopenmp",  # at::parallel_for is inlined from torch's headers and needs it
        "-fvisibility=hidden",  # only the module's init function is looked up by name
        # The same element must give the same bits in a vector body and in its tail: the compiler
        # may not fuse a multiply and an add on its own in one of them.
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
    ]
    if DEBUG:
        flags += ["-O0", "-g", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS"]
    else:
        flags += ["-O3", "-g0"]  # symbols of torch's headers would be most of the file
    return [*flags, "-Werror"] if WERROR else flags


def nvcc_flags() -> list[str]:
    """Flags of the CUDA sources; torch adds the architectures."""
    flags = [
        "-fmad=false",  # the bits of a CPU run: see -ffp-contract above
        "-Xcompiler=-fvisibility=hidden,-ffp-contract=off,-Wall,-Wextra",
    ]
    flags += ["-O0", "-g", "-UNDEBUG"] if DEBUG else ["-O3"]
    return [*flags, "-Werror=all-warnings", "-Xcompiler=-Werror"] if WERROR else flags


def defines(toolkit: Path | None) -> list[tuple[str, str | None]]:
    """Macros of every source file; all but the first are for csrc/build_info.cpp."""
    texts = {
        "ZEROCORE_TORCH_VERSION": torch.__version__,
        "ZEROCORE_CUDA_ARCHS": os.environ["TORCH_CUDA_ARCH_LIST"] if toolkit else "",
    }
    flag = [("ZEROCORE_WITH_CUDA", None)] if toolkit else []
    return flag + [(name, f'"{text}"') for name, text in texts.items()]


def extension() -> Extension:
    """The one extension module, compiled against the torch that is installed."""
    toolkit = cuda_toolkit()
    sources = {path for pattern in SOURCES for path in ROOT.glob(pattern)}
    cuda_only = {path for pattern in CUDA_ONLY for path in ROOT.glob(pattern)}
    if toolkit:
        cpp_extension.CUDA_HOME = str(toolkit)  # torch's own guess takes no wrapper into account
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", CUDA_ARCHS)
        make_extension, sources = cpp_extension.CUDAExtension, sources | cuda_only
    else:
        make_extension, sources = cpp_extension.CppExtension, sources - cuda_only
    includes = system_includes(toolkit)
    return make_extension(
        name="zerocore._C",
        sources=sorted(str(path.relative_to(ROOT)) for path in sources),  # setuptools: relative
        include_dirs=[str(ROOT / "csrc")],
        define_macros=defines(toolkit),
        extra_compile_args={"cxx": cxx_flags() + includes, "nvcc": nvcc_flags() + includes},
        extra_link_args=["-fopenmp"],
    )


class KeepObjects(cpp_extension.BuildExtension):
    """Compiles in a folder of this torch's: pip would use a new one, and start from nothing."""

    def finalize_options(self) -> None:
        """A folder that was asked for on the command line wins."""
        self.build_temp = self.build_temp or f"build/torch-{torch.__version__}"
        super().finalize_options()
        version = self.distribution.get_version()
        for extension in self.extensions:
            extension.define_macros.append(("ZEROCORE_VERSION", f'"{version}"'))


setup(ext_modules=[extension()], cmdclass={"build_ext": KeepObjects})
