"""What zerocore was built for, what this machine has, what is chosen here, and what is missing.

Nothing at the top of this file may need the compiled extension: its absence is one of the findings.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from zerocore import world

BUILD_COMMAND = "pip install --no-build-isolation ."
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
ASCEND_DRIVER = Path("/usr/local/Ascend/driver/version.info")


@dataclass(frozen=True)
class Build:
    """What the compiled extension was made from.

    Attributes:
        version: of zerocore.
        torch: the version it was compiled against.
        cuda: version of the CUDA toolkit; None for a build without CUDA.
        archs: what its CUDA kernels were compiled for, in the form of TORCH_CUDA_ARCH_LIST.
        isa: the instruction set that the CPU kernels use here.
        isas: all that they could use here.
    """

    version: str
    torch: str
    cuda: str | None
    archs: tuple[str, ...]
    isa: str
    isas: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """What torch finds on this machine.

    Attributes:
        torch: its version.
        torch_cuda: the CUDA version it was built for; None for another build.
        torch_npu: version of torch_npu; None where it is not installed.
        accelerator: type of device, "cuda" or "npu" for example; None without one.
        devices: names of the accelerators.
        capabilities: their CUDA compute capabilities; empty for others.
        nvidia_driver: version of the NVIDIA kernel driver; None where it is not loaded.
        ascend_driver: version of the Ascend driver; None where it is not installed.
        backends: version by name of communication backend, for those that torch has.
    """

    torch: str
    torch_cuda: str | None
    torch_npu: str | None
    accelerator: str | None
    devices: tuple[str, ...]
    capabilities: tuple[tuple[int, int], ...]
    nvidia_driver: str | None
    ascend_driver: str | None
    backends: dict[str, str]


def find_build() -> Build | str:
    """The build of the extension, or why it cannot be loaded."""
    try:
        from zerocore import _C

        built, isa, isas = _C.BUILD, _C.isa(), _C.isas()
    except (ImportError, ValueError) as error:  # ValueError: an unknown ZEROCORE_ISA
        return str(error)
    archs = tuple(re.split("[; ]+", built["cuda_archs"])) if built["cuda"] else ()
    return Build(built["version"], built["torch"], built["cuda"], archs, isa, tuple(isas))


def find_machine() -> Machine:
    """Asks torch, and the files in which drivers say their version."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = accelerator.type if accelerator else None
    indices = range(torch.accelerator.device_count() if accelerator else 0)
    names = getattr(torch, kind).get_device_name if kind in ("cuda", "npu") else str
    nvidia = kind == "cuda" and torch.version.cuda
    backends = dict.fromkeys(world.available_backends(("gloo", "nccl", "hccl")), "")
    if "nccl" in backends:
        backends["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    npu = getattr(torch, "npu", None)  # torch_npu loads itself with torch
    return Machine(
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        torch_npu=_torch_npu_version() if npu else None,
        accelerator=kind,
        devices=tuple(names(i) for i in indices),
        capabilities=tuple(map(torch.cuda.get_device_capability, indices)) if nvidia else (),
        nvidia_driver=_first_match(NVIDIA_DRIVER, r"Kernel Module.*?\s(\d+\.[\d.]+)"),
        ascend_driver=_first_match(ASCEND_DRIVER, r"^Version=(.+)$"),
        backends=backends,
    )


def _torch_npu_version() -> str:
    import torch_npu

    return torch_npu.__version__


def _first_match(file: Path, pattern: str) -> str | None:
    """What `pattern` captures in `file`, "unknown" if nothing; None where there is no such file."""
    try:
        text = file.read_text()
    except OSError:
        return None
    match = re.search(pattern, text, re.MULTILINE)
    return match[1].strip() if match else "unknown"


def find_choice() -> str:
    """The device and backend that `zerocore.shard` would use for a model on the CPU, and why."""
    from zerocore.backend import backend

    chosen = backend()
    return f"{chosen.device} over {chosen.name}: {chosen.reason}"


def runs_on(capability: tuple[int, int], archs: tuple[str, ...]) -> bool:
    """Whether code for `archs` runs on a GPU: of its generation and not newer, or as any PTX."""
    for arch in archs:
        match = re.fullmatch(r"(\d+)\.(\d+)(\+PTX)?", arch)
        if match is None:  # "9.0a", "Hopper": torch checked it at build time
            continue
        built = (int(match[1]), int(match[2]))
        if built <= capability and (match[3] or built[0] == capability[0]):
            return True
    return False


def problems(build: Build | str, machine: Machine) -> list[str]:
    """What is missing or does not fit, each with its remedy."""
    found = []
    if isinstance(build, str):
        found.append(
            f"the compiled extension zerocore._C: {build}. Build it in the repository with "
            f"`{BUILD_COMMAND}`, again whenever torch changes"
        )
    elif build.torch != machine.torch:
        found.append(
            f"an extension for torch {machine.torch}: this one was compiled against torch "
            f"{build.torch}. Build it again with `{BUILD_COMMAND}`"
        )
    found += _cuda_problems(build, machine)
    if machine.ascend_driver and machine.accelerator != "npu":
        if machine.torch_npu is None:
            remedy = "install the torch_npu that belongs to this torch"
        else:
            remedy = "source the set_env.sh of the CANN toolkit, and see `npu-smi info`"
        found.append(f"the use of the Ascend NPUs that this machine has a driver for: {remedy}")
    if machine.accelerator == "npu" and "hccl" not in machine.backends:
        found.append("HCCL in torch_npu: install a torch_npu that was built with it")
    if "gloo" not in machine.backends:
        found.append("gloo in torch: zerocore's ranks agree over it; install a torch that has it")
    return found


def _cuda_problems(build: Build | str, machine: Machine) -> list[str]:
    found = []
    if machine.nvidia_driver and not machine.torch_cuda and machine.accelerator is None:
        found.append(
            f"a torch for the NVIDIA GPUs that this machine has a driver for: torch "
            f"{machine.torch} is a build without CUDA; install one with it, then build zerocore"
        )
    if machine.torch_cuda and machine.accelerator is None:
        driver = machine.nvidia_driver
        found.append(
            f"a GPU for the CUDA build of torch: it finds none, and the NVIDIA driver is "
            f"{driver or 'not loaded'}. See `nvidia-smi`; in a container, start it with GPUs"
            + (f"; CUDA {machine.torch_cuda} may want a newer driver" if driver else "")
        )
    if machine.accelerator == "cuda" and "nccl" not in machine.backends:
        found.append(
            "NCCL in torch: ranks on GPUs communicate over it; install a torch that has it"
        )
    if isinstance(build, str) or not machine.torch_cuda:
        return found
    if build.cuda is None:
        found.append(
            f"CUDA kernels in zerocore, which torch {machine.torch} could use: build it where a "
            f"CUDA toolkit is; `ZEROCORE_CUDA=1 {BUILD_COMMAND}` says what it lacks"
        )
        return found
    for capability in sorted(set(machine.capabilities)):
        if not runs_on(capability, build.archs):
            name = ".".join(map(str, capability))
            found.append(
                f"CUDA kernels for compute capability {name}: they were built for "
                f'{" ".join(build.archs)}. `TORCH_CUDA_ARCH_LIST="{name}+PTX" {BUILD_COMMAND}`'
            )
    return found


def report(build: Build | str, machine: Machine, choice: str, missing: list[str]) -> str:
    """The lines that `python -m zerocore env` prints."""
    lines = ["built"]
    if isinstance(build, str):
        lines.append(_row("zerocore", f"not loadable: {build}"))
    else:
        lines.append(_row("zerocore", f"{build.version}, against torch {build.torch}"))
        cuda = f"{build.cuda}, kernels for {' '.join(build.archs)}" if build.cuda else "CPU only"
        lines.append(_row("CUDA", cuda))
        lines.append(_row("CPU kernels", f"{build.isa} (here: {', '.join(build.isas)})"))
    lines.append("found")
    torch_cuda = f"CUDA {machine.torch_cuda}" if machine.torch_cuda else "no CUDA"
    torch_npu = f", torch_npu {machine.torch_npu}" if machine.torch_npu else ""
    python = f"Python {platform.python_version()}"
    lines.append(_row("torch", f"{machine.torch} ({torch_cuda}{torch_npu}, {python})"))
    names = ", ".join(dict.fromkeys(machine.devices))
    devices = f"{len(machine.devices)} x {machine.accelerator} ({names})"
    lines.append(_row("accelerator", devices if machine.accelerator else "none"))
    drivers = {"NVIDIA": machine.nvidia_driver, "Ascend": machine.ascend_driver}
    versions = [f"{maker} {version}" for maker, version in drivers.items() if version]
    lines.append(_row("driver", ", ".join(versions) or "none"))
    backends = [f"{name} {version}".strip() for name, version in machine.backends.items()]
    lines.append(_row("backends", ", ".join(backends) or "none"))
    lines += ["chosen", _row("a CPU model", f"trains on {choice}")]
    lines += ["missing", *(f"  - {problem}" for problem in missing or ["nothing"])]
    return "\n".join(lines)


def _row(name: str, text: str) -> str:
    return f"  {name:<12} {text}"
