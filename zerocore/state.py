"""Full tensors under the original names: model.state_dict(), load_state_dict() and relatives."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zerocore import registry
from zerocore.runtime import Sharded


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
    """The model's state with full tensors under the original names, as before `zerocore.shard`.

    A collective over the model's ranks, which gathers unit by unit. Parameters come in their own
    dtype (fp32 master values under mixed precision), as copies; buffers are this rank's, in their
    own dtype too. Parameters that were DTensors come as DTensors; `load_state_dict` accepts these,
    and full plain tensors.

    Args:
        rank0_only: other ranks take part but get an empty dict, and hold one unit at most.

    Raises:
        ValueError: if `model` is not sharded.
    """
    sharded = registry.require_sharded(model, "zerocore.full_state_dict")
    keep = not rank0_only or sharded[0].groups.first
    for owner in sharded:
        owner.state_stays = keep
    try:
        state = model.state_dict()
    finally:
        for owner in sharded:
            owner.state_stays = True
    if not keep:
        state.clear()
    return state


class StateHooks:
    """Makes state_dict() and load_state_dict() of a sharded model speak of full tensors.

    torch calls the hooks of every submodule; the outermost one does the work, so that each unit is
    gathered once.
    """

    def __init__(self, model: nn.Module, sharded: Sharded) -> None:
        self._sharded = sharded
        self._outermost: nn.Module | None = None
        # torch marks the functions that it is given: methods cannot be marked, functions can.
        before_save = functools.partial(self._before_save)
        after_save = functools.partial(self._after_save)
        for module in model.modules():
            module.register_state_dict_pre_hook(before_save)
            module.register_state_dict_post_hook(after_save)
            module.register_load_state_dict_pre_hook(self._before_load)
            module.register_load_state_dict_post_hook(self._after_load)

    def _before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self._outermost is None:
            self._outermost = module

    def _after_save(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        if module is not self._outermost:
            return
        self._outermost = None
        names: dict[tuple[int, int], list[tuple[registry.Entry, str]]] = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            entry = registry.entry_of(param)
            if entry is not None and entry.sharded() is self._sharded and prefix + name in state:
                names.setdefault((entry.unit, entry.flat), []).append((entry, prefix + name))
        for (unit, flat), wanted in names.items():
            tensors = self._sharded.core.full_tensors(unit, flat)
            if not self._sharded.state_stays:
                continue
            for entry, name in wanted:
                state[name] = entry.whole(tensors[entry.index])
        self._save_buffers(module, state, prefix)

    def _save_buffers(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        for path, child in module.named_modules(remove_duplicate=False):
            for name in child._buffers:
                key = f"{prefix}{path}.{name}" if path else prefix + name
                values = self._sharded.buffers.saved(child, name) if key in state else None
                if values is not None:
                    state[key] = values

    def _before_load(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        # A parameter may have several names here.
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            entry = registry.entry_of(param)
            key = prefix + name
            if entry is None or entry.sharded() is not self._sharded or key not in state:
                continue
            if metadata.get("assign_to_params_buffers"):
                raise ValueError(
                    "load_state_dict: expected assign=False for a sharded model, whose parameters "
                    "must stay the same objects, got assign=True"
                )
            full = state[key]
            try:
                if not isinstance(full, torch.Tensor):
                    raise ValueError(f"expected a tensor, got {full!r}")
                state[key] = entry.local(full.detach())
            except ValueError as error:
                errors.append(f"{key}: {error}")
                state[key] = param.detach()
                continue
            self._sharded.mark_loaded([entry.name])
            if not self._sharded.core.is_open(entry.unit):
                self._sharded.core.before_write()
                core = self._sharded.core
                state[key] = core.slice(entry.unit, entry.flat, entry.index, state[key])
        if not metadata.get("assign_to_params_buffers"):  # else the next forward finds the new ones
            self._load_buffers(module, state, prefix)

    def _load_buffers(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        for name in module._buffers.keys() - module._non_persistent_buffers_set:
            source = state.get(prefix + name)
            if isinstance(source, torch.Tensor):
                state[prefix + name] = self._sharded.buffers.load(module, name, source)
                if self._sharded.unloaded is not None:
                    self._sharded.unloaded.mark_buffer(module._buffers, name)

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        for param in module.parameters(recurse=False):
            entry = registry.entry_of(param)
            if entry is not None and entry.sharded() is self._sharded:
                self._sharded.core.after_step(entry.unit, entry.flat)


@contextlib.contextmanager
def gathered(module: nn.Module, write: bool = False) -> Iterator[nn.Module]:
    """Full parameters of `module` (and below), under their names, inside the `with` block.

    A collective: every rank of the model enters and leaves. Units are opened whole. Outside of a
    forward the parameters have their own dtype (the fp32 master values under mixed precision).
    Parameters that were DTensors show the tensor-parallel rank's part of them, as plain tensors.
    Inside the forward of the model it opens the windows for a computation that reads parameters
    of a submodule without calling it; gradients flow as usual.

    Args:
        write: on exit, rank 0's content becomes the parameters' on every rank; they count as
            loaded then.

    Raises:
        ValueError: if no parameter of `module` is sharded.
        RuntimeError: if parameters were changed without `write`, or `write` was asked for in a
            forward.
    """
    opened: dict[Sharded, set[int]] = {}
    for param in module.parameters():
        entry = registry.entry_of(param)
        if entry is not None and (sharded := entry.sharded()) is not None:
            opened.setdefault(sharded, set()).add(entry.unit)
    if not opened:
        raise ValueError(
            "zerocore.gathered: expected a module with parameters that zerocore.shard took over, "
            f"got {type(module).__name__} without any"
        )
    with contextlib.ExitStack() as stack:
        for sharded, units in opened.items():
            order = sorted(units)
            sharded.core.open(order)
            stack.callback(sharded.core.close, order, write)
        yield module
    if write:
        for param in module.parameters():
            entry = registry.entry_of(param)
            if entry is not None and (sharded := entry.sharded()) is not None:
                sharded.mark_loaded([entry.name])
