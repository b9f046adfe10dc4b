"""Which device a model trains on, and which communication backend carries its collectives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from zerocore import world

# The backend is tied to the type of device: names alone are ambiguous (Habana has an "hccl" too).
NAMES = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}


class Backend(NamedTuple):
    """Where a model trains, and how its ranks communicate there."""

    device: torch.device  # this rank's; accelerators with their index
    name: str  # of the communication backend: "gloo", "nccl", "hccl" or "fake"
    reason: str  # why this one, in a sentence


def backend(device: torch.device | str | None = None) -> Backend:
    """The device and communication backend that `zerocore.shard` uses for a model on the CPU.

    The machine's accelerator (Ascend NPU with torch_npu, else CUDA GPU), unless the default process
    group cannot use it: `init_process_group("gloo")` on a machine with GPUs asks for CPU ranks, and
    so does torch's fake process group, for dry runs of any number of ranks in one process.

    Args:
        device: one to use whatever the process group was made for; None: the choice is zerocore's.

    Raises:
        ValueError: for a device that zerocore or this machine does not have, and for one that is
            not this rank's current device.
    """
    if device is not None:
        device = torch.device(device)
        return _on(device, f"{device} was asked for")
    # torch_npu, where it is installed, is loaded by `import torch`, and then comes before CUDA.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return _cpu("torch finds no accelerator on this machine")
    kind = accelerator.type
    if kind not in NAMES:
        return _cpu(f"the accelerator of this machine is of type {kind}, not npu or cuda")
    made_for = world.default_backends()
    if world.is_fake():
        return _cpu("the default process group is a fake one")
    if made_for is None:
        return _on(accelerator, f"torch finds an accelerator of type {kind} on this machine")
    if made_for.get(kind) == NAMES[kind]:
        return _on(accelerator, f"the default process group has {NAMES[kind]} for {kind}")
    return _cpu(
        f"the default process group has {made_for.get(kind, 'nothing')} for {kind}, where "
        f"init_process_group({NAMES[kind]!r}) would have asked for the accelerator"
    )


def choose(devices: Iterable[torch.device], mesh_type: str | None) -> Backend:
    """The device and backend of a model.

    Args:
        devices: those of its parameters. An accelerator among them decides.
        mesh_type: the device type of the user's mesh, which decides otherwise.

    Raises:
        ValueError: for parameters on several devices, or on another than this rank's current one.
    """
    found = sorted({d for d in devices if d.type != "meta"}, key=str)
    if len(found) > 1:
        raise ValueError(
            "model: expected parameters on one device, got them on "
            f"{', '.join(map(str, found))}; call model.to(device) first"
        )
    if found and found[0].type != "cpu":
        return _on(found[0], f"the parameters are on {found[0]}")
    if mesh_type is not None:
        return _on(torch.device(mesh_type), f"the mesh is of device type {mesh_type}")
    return backend()


def _cpu(reason: str) -> Backend:
    return Backend(torch.device("cpu"), _name("cpu"), reason)


def _name(kind: str) -> str:
    return world.FAKE if world.is_fake() else NAMES[kind]


def _on(device: torch.device, reason: str) -> Backend:
    """`device`, which must be this rank's current one if it has an index."""
    kind = device.type
    if kind == "cpu":
        return _cpu(reason)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = {"cpu"} if accelerator is None else {"cpu", accelerator.type}
    usable = [name for name in NAMES if name in available]
    if kind not in usable:
        raise ValueError(f"device: expected {' or '.join(usable)} on this machine, got {device}")
    current = torch.device(kind, torch.accelerator.current_device_index())
    if device.index not in (None, current.index):
        raise ValueError(
            f"device: expected {current}, the current device of this rank, got {device}; call "
            f"torch.{kind}.set_device(local_rank) first, and use that device"
        )
    return Backend(current, _name(kind), reason)
