"""Parameters that are DTensors: zerocore takes over their local tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class TensorParallel:
    """How a parameter lies over the tensor-parallel ranks.

    Attributes:
        mesh: the tensor-parallel ranks.
        placements: one a dimension of the mesh, each Shard or Replicate.
        shape, stride: those of the whole parameter.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def copies(self) -> int:
        """How many of the tensor-parallel ranks hold the same element."""
        dims = zip(self.mesh.mesh.shape, self.placements, strict=True)
        return math.prod(size for size, placement in dims if placement.is_replicate())

    @functools.cached_property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """A sum over these groups, one after the other, is one over the tensor-parallel ranks."""
        sizes = enumerate(self.mesh.mesh.shape)
        return tuple(self.mesh.get_group(dim) for dim, size in sizes if size > 1)

    def whole(self, local: torch.Tensor) -> DTensor:
        """The DTensor of this rank's part, of which it is a view; gradients flow."""
        # Gradients are brought to the same placements on their way back, summed where the forward
        # was given copies.
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )

    def local(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of this rank of a DTensor with these placements, or of a whole plain tensor.

        Raises:
            ValueError: for another shape or other placements.
        """
        if whole.shape != self.shape:
            raise ValueError(f"expected the shape {tuple(self.shape)}, got {tuple(whole.shape)}")
        if not isinstance(whole, DTensor):
            # No source rank: every rank cuts its own part, and nothing is sent.
            whole = distribute_tensor(
                whole.detach(), self.mesh, self.placements, src_data_rank=None
            )
        if whole.device_mesh != self.mesh or whole.placements != self.placements:
            raise ValueError(
                f"expected a DTensor with {self.placements} on {self.mesh}, got "
                f"{whole.placements} on {whole.device_mesh}; redistribute it first"
            )
        return whole.detach().to_local()


@dataclass
class Part:
    """A DTensor parameter of a model and the plain one in its place.

    Attributes:
        name: its first name in the model.
        places: modules and their names for it.
        original: the DTensor.
        local: the plain parameter, whose memory is the local tensor's.
        how: where the rest is.
    """

    name: str
    places: list[tuple[nn.Module, str]]
    original: nn.Parameter
    local: nn.Parameter
    how: TensorParallel


def parts_of(model: nn.Module, data_ranks: Iterable[int]) -> list[Part]:
    """The DTensor parameters of a model; nothing is changed.

    Args:
        data_ranks: the ranks of data parallelism, this one among them.

    Raises:
        ValueError: for ranks that are in both kinds of parallelism, for gradients and hooks.
        NotImplementedError: for placements other than Shard and Replicate.
    """
    parts: dict[int, Part] = {}
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if not isinstance(param, DTensor):
                continue
            if id(param) not in parts:
                full_name = f"{path}.{name}" if path else name
                _check(full_name, param, set(data_ranks))
                parts[id(param)] = Part(full_name, [], param, _local(param), _how(param))
            parts[id(param)].places.append((module, name))
    return list(parts.values())


def _check(name: str, param: DTensor, data_ranks: set[int]) -> None:
    mesh = param.device_mesh
    if mesh.get_coordinate() is None:
        raise ValueError(f"{name}: expected a DTensor on this rank, got one on {mesh} without it")
    both = data_ranks.intersection(mesh.mesh.flatten().tolist())
    if len(both) > 1:
        raise ValueError(
            "mesh: expected the ranks of data parallelism only, got several that share the "
            f"tensor-parallel parameter {name!r}: {sorted(both)}; of a mesh with the dimensions "
            "('dp', 'tp') pass mesh=mesh['dp']"
        )
    if not all(type(placement) in (Shard, Replicate) for placement in param.placements):
        raise NotImplementedError(
            f"{name}: expected the placements Shard and Replicate, got {param.placements}"
        )
    if param.device.type == "meta":
        raise NotImplementedError(
            f"{name}: expected a DTensor with memory, got one on the meta device, which is not "
            "supported yet"
        )
    if param.grad is not None:
        raise ValueError(
            f"{name}: expected a parameter without a gradient, got one; call zero_grad() before "
            "zerocore.shard"
        )
    if param._backward_hooks or param._post_accumulate_grad_hooks:
        raise ValueError(
            f"{name}: expected a DTensor without hooks, got some, which do not fit its local "
            "tensor; register them after zerocore.shard"
        )


def _local(param: DTensor) -> nn.Parameter:
    local = nn.Parameter(_waited(param.detach().to_local()), param.requires_grad)
    for key, value in vars(param).items():
        if key != "_is_param":  # torch's mark of a parameter of another class
            setattr(local, key, value)
    return local


def _how(param: DTensor) -> TensorParallel:
    return TensorParallel(
        param.device_mesh, tuple(param.placements), param.shape, tuple(param.stride())
    )


def replace(parts: Iterable[Part]) -> None:
    """Puts the local parameters in the places of the DTensors."""
    for part in parts:
        for module, name in part.places:
            module._parameters[name] = part.local


def restore(parts: Iterable[Part]) -> None:
    """Undoes `replace`."""
    for part in parts:
        for module, name in part.places:
            module._parameters[name] = part.original


def facts(parts: Iterable[Part]) -> list[tuple[str, Any]]:
    """What has to be the same on all ranks of data parallelism, which hold the same part."""
    found = []
    for part in parts:
        how = part.how
        where = (how.shape, how.stride, how.placements, how.mesh.mesh.shape)
        found.append((f"DTensor {part.name!r}:", (where, how.mesh.get_coordinate())))
    return found


def hook(parts: Iterable[Part]) -> None:
    """Lets the forwards of the modules see DTensors again.

    To be called before the hooks of units are made: those come first then, so that a forward's
    DTensors are views of the window.
    """
    modules: dict[nn.Module, dict[str, TensorParallel]] = {}
    for part in parts:
        for module, name in part.places:
            modules.setdefault(module, {})[name] = part.how
    for module, names in modules.items():
        _hook(module, names)


def _hook(module: nn.Module, names: dict[str, TensorParallel]) -> None:
    shown: list[dict[str, nn.Parameter]] = []  # of calls that run, one in the other

    def before(module: nn.Module, args: Any) -> None:
        # In a call inside a call they are there already.
        params = {n: p for n in names if not isinstance(p := module._parameters[n], DTensor)}
        shown.append(params)
        for name, param in params.items():
            module._parameters[name] = _shown(param, names[name])

    def after(module: nn.Module, args: Any, output: Any) -> None:
        # A hook that ran earlier may have failed: then there was no `before`.
        module._parameters.update(shown.pop() if shown else {})

    module.register_forward_pre_hook(before, prepend=True)
    module.register_forward_hook(after, always_call=True)


def _shown(param: nn.Parameter, how: TensorParallel) -> DTensor:
    local = param.view_as(param)
    if local.requires_grad:
        local.register_hook(_waited)
    return how.whole(local)


def _waited(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor of a collective that perhaps still runs."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
