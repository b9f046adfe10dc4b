"""Models on the meta device: memory and initial values, module by module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import nn

from zerocore import _C, registry
from zerocore.strides import memory_strides

Init = Callable[[nn.Module], object] | Literal["empty"] | None

_Buffers = dict[str, torch.Tensor | None]


class Initialiser:
    """Gives the parameters and buffers of a meta model memory, and has its modules fill them.

    Memory is filled with NaN first (whole numbers and bools: zeros), so that what is forgotten is
    noticed: after the initialisation no floating tensor may hold NaN, and to every other buffer
    something must have been written.

    A module is initialised once, when the first unit that has one of its parameters is taken over;
    parameters of it in later units get memory then too. Within a unit children come before their
    parents, as in `nn.Module.apply`.

    Args:
        model: its modules that are in no model sharded before are looked at.
        init: see `zerocore.shard`.

    Raises:
        ValueError: for an `init` of another kind, or one for a model without anything on the meta
            device, and for modules that `init` leaves without a way to be initialised.
    """

    def __init__(self, model: nn.Module, init: Init) -> None:
        if not (init is None or callable(init) or init == "empty"):
            raise ValueError(
                f"init: expected a function of a module, 'empty' or None, got {init!r}"
            )
        own = set(registry.own_modules(model))
        self._modules: dict[nn.Module, str] = {
            module: name
            for name, module in _children_first(model, "", set())
            if module in own and any(_on_meta(module))
        }
        if init is not None and not self._modules:
            raise ValueError(
                "init: expected None for a model without parameters or buffers on the meta device, "
                f"got {init!r}; its values are taken as they are"
            )
        self._empty = init == "empty"
        self._functions = {
            module: init if callable(init) else _default(model, module)
            for module in self._modules
            if not self._empty or _lost_buffers(module)
        }
        for module, function in self._functions.items():
            if function is None:
                name = self._modules[module] or "the model"
                raise ValueError(_without_default(name, module, self._empty))
        self._shared: dict[torch.Tensor, torch.Tensor] = {}  # meta buffers and real ones
        self._versions: dict[torch.Tensor, int] = {}  # of real ones that nobody has written to
        self._names = {
            param: name
            for name, param in model.named_parameters()
            if param.device.type == "meta" and registry.entry_of(param) is None
        }
        filled = {param for module in self._functions for param in module._parameters.values()}
        self._left_empty = self._names.keys() - filled

    def __bool__(self) -> bool:
        """Whether anything of the model is on the meta device."""
        return bool(self._modules)

    def owns(self, param: nn.Parameter) -> bool:
        """Whether it was on the meta device."""
        return param in self._names

    def leaves_empty(self, param: nn.Parameter) -> bool:
        """Whether it gets neither memory nor values: `init="empty"`, and no module needs them."""
        return param in self._left_empty

    def filled(self) -> list[str]:
        """Names of the parameters on the meta device that get values."""
        return [name for param, name in self._names.items() if param not in self._left_empty]

    def unloaded(self) -> Unloaded | None:
        """What has to be loaded before the model is used; to be asked before memory is given."""
        if not self._empty or not self._modules:
            return None
        buffers = {}
        for module, name in self._modules.items():
            for key, buffer in module._buffers.items():
                saved = key not in module._non_persistent_buffers_set
                if saved and buffer is not None and buffer.device.type == "meta":
                    buffers[id(module._buffers), key] = f"{name}.{key}".lstrip(".")
        return Unloaded(set(self._names.values()), buffers)

    def fill(self, params: list[nn.Parameter]) -> None:
        """Initialises the modules that own these parameters, those on the meta device or once.

        They have memory on the CPU then, but for those that are left empty.

        Raises:
            ValueError: for an initialisation that forgets a parameter or replaces it.
        """
        before = {param: (param.shape, param.dtype, memory_strides(param)) for param in params}
        modules = [
            module
            for module in self._modules
            if any(param in before for param in module._parameters.values() if param is not None)
        ]
        self._initialise(modules)
        for param, (shape, dtype, strides) in before.items():
            name = self._names[param]
            if param.shape != shape or param.dtype != dtype:
                raise ValueError(
                    f"init: {name}: expected it to keep the shape {tuple(shape)} and {dtype}, got "
                    f"{tuple(param.shape)} and {param.dtype}"
                )
            if not self._empty:
                _refuse_nan(name, param)
            if param.stride() != strides and not self.leaves_empty(param):  # its data was replaced
                memory = torch.empty_strided(shape, strides, dtype=dtype)
                _C.show(param, memory.copy_(param))

    def fill_rest(self) -> None:
        """Initialises the modules that are left: they have buffers only."""
        self._initialise(list(self._modules))

    @torch.no_grad()
    def _initialise(self, modules: list[nn.Module]) -> None:
        for module in modules:
            self._give_memory(module)
        for module in modules:
            before = dict(module._parameters)
            function = self._functions.get(module)
            if function is not None:
                function(module)
            name = self._modules.pop(module)
            for key, param in before.items():
                if module._parameters.get(key) is not param:
                    raise ValueError(
                        f"init: {name}: expected it to fill {key!r} in place, got another object "
                        "in its place; write to it, for example with torch.nn.init"
                    )
            for key, buffer in module._buffers.items():
                loaded = self._empty and key not in module._non_persistent_buffers_set
                if buffer is not None and not loaded:
                    _refuse_nan(f"{name}.{key}".lstrip("."), buffer)
                    self._refuse_untouched(f"{name}.{key}".lstrip("."), buffer)

    def _refuse_untouched(self, name: str, buffer: torch.Tensor) -> None:
        version = self._versions.get(buffer)
        if version is None or _has_nan(buffer) or buffer._version != version or buffer.any():
            return
        raise ValueError(
            f"init: expected the buffer {name!r} ({buffer.dtype}) to get values, got nothing "
            "written to it: what the constructor gave it is lost on the meta device; pass init=fn, "
            "which fills it"
        )

    def _give_memory(self, module: nn.Module) -> None:
        for param in module._parameters.values():
            on_meta = param is not None and param.device.type == "meta"
            if on_meta and not self.leaves_empty(param):
                _C.show(param, unwritten(param))
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.device.type != "meta":
                continue
            if buffer not in self._shared:
                memory = _poisoned(torch.empty_like(buffer, device="cpu"))
                self._shared[buffer], self._versions[memory] = memory, memory._version
            module._buffers[name] = self._shared[buffer]


class Unloaded:
    """What of a model with `init="empty"` has no values yet.

    Args:
        params: names of parameters.
        buffers: names of buffers by the id of a module's `_buffers` and the name in it.
    """

    def __init__(self, params: set[str], buffers: Mapping[tuple[int, str], str]) -> None:
        self._names = params | set(buffers.values())
        self._buffers = buffers

    def mark(self, names: Iterable[str]) -> None:
        """These have values now."""
        self._names.difference_update(names)

    def mark_buffer(self, buffers: _Buffers, name: str) -> None:
        """So has this one, of a module's `_buffers`."""
        self._names.discard(self._buffers.get((id(buffers), name), ""))

    def error(self) -> RuntimeError | None:
        """What to say if the model is used now."""
        if not self._names:
            return None
        more = f" and {len(self._names) - 1} more" if len(self._names) > 1 else ""
        return RuntimeError(
            "zerocore: expected every parameter of a model sharded with init='empty' to be loaded "
            f"before it is used, got none for {min(self._names)!r}{more}; call load_state_dict, or "
            "load a checkpoint"
        )


def _children_first(
    module: nn.Module, name: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    for key, child in module.named_children():
        yield from _children_first(child, f"{name}.{key}".lstrip("."), seen)
    yield name, module


def _on_meta(module: nn.Module) -> Iterator[bool]:
    """Whether each parameter and buffer of exactly this module has no memory."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and registry.entry_of(tensor) is None:
            yield tensor.device.type == "meta"


def _lost_buffers(module: nn.Module) -> bool:
    """Whether it has meta buffers that no state dict brings back."""
    found = (module._buffers[name] for name in module._non_persistent_buffers_set)
    return any(buffer is not None and buffer.device.type == "meta" for buffer in found)


def _default(model: nn.Module, module: nn.Module) -> Callable[[nn.Module], None] | None:
    """A module's own initialisation, then that of the model around it; None if it has neither.

    The model's is the `_init_weights(module)` of Hugging Face's models (and of many others), taken
    from the innermost module around it that has one.
    """
    own = next(
        (
            n
            for n in ("reset_parameters", "_reset_parameters")
            if callable(getattr(module, n, None))
        ),
        None,
    )
    around = None
    for outer in model.modules():  # outermost first
        if callable(getattr(outer, "_init_weights", None)) and module in set(outer.modules()):
            around = outer
    if own is None and around is None:
        return None

    def initialise(module: nn.Module) -> None:
        if own is not None:
            getattr(module, own)()
        if around is not None:
            around._init_weights(module)

    return initialise


def _without_default(name: str, module: nn.Module, empty: bool) -> str:
    names = [
        key for key, t in (*module._parameters.items(), *module._buffers.items()) if t is not None
    ]
    if empty:
        names = sorted(module._non_persistent_buffers_set)
    return (
        f"init: expected modules on the meta device to have reset_parameters(), got {name} "
        f"({type(module).__name__}, with {', '.join(names)}) without it, in no model that has "
        "_init_weights(module); pass init=fn, which is called with each such module and fills its "
        "parameters and buffers"
        + ("; buffers that are not persistent are in no state to be loaded" if empty else "")
    )


def _has_nan(tensor: torch.Tensor) -> bool:
    """Whether its dtype has."""
    return tensor.is_floating_point() or tensor.is_complex()


def unwritten(param: nn.Parameter) -> torch.Tensor:
    """Memory for a parameter, which shows that nobody has written to it."""
    return _poisoned(torch.empty_strided(param.shape, memory_strides(param), dtype=param.dtype))


def _poisoned(memory: torch.Tensor) -> torch.Tensor:
    return memory.fill_(math.nan) if _has_nan(memory) else memory.zero_()


def _refuse_nan(name: str, tensor: torch.Tensor) -> None:
    if _has_nan(tensor) and tensor.isnan().any():
        raise ValueError(
            f"init: expected every element of {name!r} to get a value, got NaN in it (memory is "
            "filled with NaN before the initialisation)"
        )
