"""deferred(): runs a model's construction without memory for its large tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.weak import WeakTensorKeyDictionary

from zerocore.deferred.blank import heap, is_plain, key_of
from zerocore.deferred.recorder import ReadsByHand, Recorder
from zerocore.deferred.tape import Tape

# Of every tensor without memory the tape that knows its content; it lives as long as one of them.
_pending: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def deferred(
    build: Callable[[], nn.Module],
    seed: int | None = None,
    *,
    cache_bytes: int = 64 * 2**20,
    min_bytes: int = 64 * 2**10,
) -> nn.Module:
    """The model that `build()` constructs, without memory for its large tensors.

    For models larger than a process's memory: `zerocore.shard` gives the parameters of a deferred
    model values unit by unit, and keeps this rank's shard. Every parameter, buffer and tensor
    attribute, and the state of torch's generators, is bit for bit what `torch.manual_seed(seed);
    build()` gives. No process group is needed.

    `build` runs as it is, once, with its large tensors on the CPU replaced by ones without memory;
    what writes them is recorded and run again when the values are needed. Random numbers are drawn
    on the way, so it takes about twice the time. Values can be read (`.item()`, branches, `print`,
    `.numpy()`, which is read-only): each read computes them. Tensors on other devices are made as
    usual. What a forward inside of `build` computes may be rounded in another way: torch then takes
    no fused kernels for TransformerEncoderLayer, nor for an LSTM under autograd.

    Until `zerocore.shard` the model can be looked at (names, shapes, dtypes) and rearranged, but
    reading or writing a large tensor is an error: forward, state_dict(), load_state_dict(), copies,
    pickling, `.to()` another dtype or device. Buffers and small tensors are real after shard() as
    in any model; other tensors that the build leaves behind, attributes of modules for example,
    are real at once.

    Args:
        build: takes no arguments and returns the model.
        seed: for `torch.manual_seed`; None: generators as they are.
        cache_bytes: limit of the values kept during the build because they may be read again.
        min_bytes: tensors below this size are made as usual.

    Raises:
        ValueError: if `build` returns something else than a module, or an option is out of range.
        NotImplementedError: for what cannot be run later, by name: random operations in place whose
            draws depend on values (bernoulli_), resizing, addresses of tensors, DTensors.
        RuntimeError: if it is called inside of `build`.
    """
    if not callable(build) or isinstance(build, nn.Module):
        raise ValueError(
            "zerocore.deferred: build: expected a function that returns the model, got "
            f"{type(build).__name__}; write zerocore.deferred(lambda: Model(...))"
        )
    for name, value in (("cache_bytes", cache_bytes), ("min_bytes", min_bytes)):
        if type(value) is not int or value < 0:
            raise ValueError(
                f"zerocore.deferred: {name}: expected an integer of at least 0, got {value!r}"
            )
    refuse_inside_build("zerocore.deferred")
    tape = Tape(cache_bytes)
    if seed is not None:
        torch.manual_seed(seed)
    with Recorder(tape, min_bytes), ReadsByHand(tape):
        model = build()
    if not isinstance(model, nn.Module):
        raise ValueError(
            "zerocore.deferred: expected build() to return a torch.nn.Module, got "
            f"{type(model).__name__}"
        )
    _seal(tape, model)
    heap.trim()
    return model


def refuse_inside_build(caller: str) -> None:
    """Raises if a deferred model is being built on this thread.

    Raises:
        RuntimeError: if so.
    """
    if any(isinstance(mode, Recorder) for mode in _get_current_dispatch_mode_stack()):
        raise RuntimeError(f"{caller}: expected no call inside of the `build` of zerocore.deferred")


def is_blank(tensor: torch.Tensor) -> bool:
    """Whether it has no memory yet."""
    return tape_of(tensor) is not None


def tape_of(tensor: torch.Tensor) -> Tape | None:
    """The tape that knows the content of a tensor without memory, or None."""
    if not _pending or not is_plain(tensor):
        return None
    tape = _pending.get(tensor)
    if tape is not None and tape.owns(tensor):
        return tape
    # A view, or another parameter over the same storage, that was made since.
    return next((tape for tape in set(_pending.values()) if tape.owns(tensor)), None)


def place_of(tensor: torch.Tensor) -> object:
    """The same for two tensors if they start at the same place in memory, or will."""
    if is_blank(tensor):
        return key_of(tensor), tensor.storage_offset() * tensor.element_size()
    return tensor.data_ptr()


def forget(tensors: list[torch.Tensor]) -> None:
    """To be told which tensors have got memory; a tape without others is cleared."""
    tapes = {_pending.pop(tensor) for tensor in tensors if tensor in _pending}
    for tape in tapes.difference(_pending.values()):
        tape.clear()


def _seal(tape: Tape, model: nn.Module) -> None:
    """Decides what becomes of each tensor that the build has left without memory."""
    for name, param in model.named_parameters():
        if isinstance(param, DTensor) and tape.owns(param.to_local()):
            raise NotImplementedError(
                f"zerocore.deferred: {name}: expected plain tensors, got a DTensor; parallelize "
                "the model without zerocore.deferred"
            )
    own = {id(tensor): tensor for tensor in _tensors(model) if tape.owns(tensor)}
    # Whatever else the build has left behind is nobody's shard: it is real at once. Tensors are
    # found wherever they are, in attributes, in lists and objects in them, in closures.
    gc.collect()
    left = [
        found
        for found in gc.get_objects()
        if issubclass(type(found), torch.Tensor) and id(found) not in own and tape.owns(found)
    ]
    with torch.no_grad():
        for tensor in left:
            tensor.data = tape.resident(tensor)
    tape.seal(own.values())
    if not own:
        tape.clear()
        return
    for tensor in own.values():
        _pending[tensor] = tape
    guard = _Guard(tape)
    for module in model.modules():
        guard.watch(module)


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


class _Guard:
    """A hook that makes state dicts, copies and pickles of a module without memory an error.

    A state dict holds tensors and reads none, and a pickle comes to the hooks of a module first:
    without this, whoever reads the one would be told later, and the other would fail obscurely.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = weakref.ref(tape)

    def watch(self, module: nn.Module) -> None:
        """Until the tape is cleared."""
        tape = self._tape()
        tape.when_cleared.append(module.register_state_dict_pre_hook(self).remove)
        tape.when_cleared.append(module.register_load_state_dict_pre_hook(self).remove)

    def __call__(self, module: nn.Module, *args: Any) -> None:
        tape = self._tape()
        tensors = (*module.named_parameters(), *module.named_buffers())
        names = [name for name, t in tensors if tape is not None and tape.owns(t)]
        if names:
            raise RuntimeError(
                "zerocore: expected zerocore.shard(model, ...) before the state_dict of a model "
                f"from zerocore.deferred is made or loaded, got {names[0]!r} without memory"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "zerocore: expected zerocore.shard(model, ...) before a model from zerocore.deferred "
            "is copied or pickled, got one without memory"
        )
