"""Builds the extension module `zerocore._C`; all else about the package is in pyproject.toml.

Environment variables (a value that is not listed stops the build):
    ZEROCORE_CUDA=auto|0|1   CUDA kernels: if they can be built, never, or an error if they cannot
    ZEROCORE_WERROR=0|1      1 turns compiler warnings into errors
    DEBUG=0|1                1 builds without optimisation, with symbols and library assertions
"""

import os
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

ROOT = Path(__file__).resolve().parent
SOURCES = ("csrc/kernels/*.cpp", "csrc/ops/*.cpp", "csrc/runtime/*.cpp", "csrc/module.cpp")


def env_choice(name: str, choices: tuple[str, ...]) -> str:
    """The value of environment variable `name`; unset or empty means the first of `choices`."""
    value = os.environ.get(name) or choices[0]
    if value not in choices:
        raise SystemExit(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    return value


def compiler_flags() -> list[str]:
    """Flags of every source file. The C++ standard is the one torch adds: its headers need it."""
    flags = [
        "-fopenmp",  # at::parallel_for is inlined from torch's headers and needs it
        "-fvisibility=hidden",  # only the module's init function is looked up by name
        # The same element must give the same bits in a vector body and in its tail: the compiler
        # may not fuse a multiply and an add on its own in one of them.
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        *[f"-isystem{path}" for path in include_paths()],  # no warnings from torch's own headers
    ]
    if env_choice("DEBUG", ("0", "1")) == "1":
        flags += ["-O0", "-g", "-UNDEBUG", "-D_GLIBCXX_ASSERTIONS"]
    else:
        flags += ["-O3", "-g0"]  # symbols of torch's headers would be most of the file
    if env_choice("ZEROCORE_WERROR", ("0", "1")) == "1":
        flags.append("-Werror")
    return flags


def extension() -> CppExtension:
    """The one extension module, compiled against the torch that is installed."""
    if env_choice("ZEROCORE_CUDA", ("auto", "0", "1")) == "1":
        raise SystemExit(
            "ZEROCORE_CUDA=1: expected CUDA kernels in csrc, got none: this version of zerocore "
            "has no CUDA kernels yet. Unset the variable (or set it to 0) to build for the CPU."
        )
    sources = [path for pattern in SOURCES for path in sorted(ROOT.glob(pattern))]
    return CppExtension(
        name="zerocore._C",
        sources=[str(path.relative_to(ROOT)) for path in sources],  # setuptools wants them relative
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args={"cxx": compiler_flags()},
        extra_link_args=["-fopenmp"],
    )


class KeepObjects(BuildExtension):
    """Compiles in build/temp: pip would use a new folder, and start from nothing each time."""

    def finalize_options(self) -> None:
        """A folder that was asked for on the command line wins."""
        self.build_temp = self.build_temp or "build/temp"
        super().finalize_options()


setup(ext_modules=[extension()], cmdclass={"build_ext": KeepObjects})
