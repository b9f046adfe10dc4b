"""Modes under which large tensors get no memory, and a tape remembers what writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zerocore import _C
from zerocore.deferred.blank import Geometry, blank, covers_storage, heap, key_of
from zerocore.deferred.tape import Draw, Entry, Tape

# Random operators that draw as many numbers as shapes and dtypes say, whatever the values are.
_DRAWS_BY_SHAPE = frozenset(
    "normal_ uniform_ randn rand randint random_ exponential_ cauchy_ log_normal_ geometric_ "
    "randperm randn_like rand_like randint_like normal".split()
)
# They write every element of their first argument and do not read it.
_OVERWRITE = frozenset(
    "normal_ uniform_ zero_ fill_ copy_ random_ exponential_ cauchy_ log_normal_ geometric_".split()
)
_UNINITIALISED = frozenset(
    "empty empty_strided empty_like new_empty empty_permuted new_empty_strided".split()
)
# They change which elements a tensor shows, as views do.
_GEOMETRY = frozenset("_unsafe_view lift_fresh alias detach _reshape_alias set_".split())
# What they return is no tensor, or its shape depends on values.
_READS = frozenset("_local_scalar_dense equal nonzero is_nonzero allclose".split())
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")

_Call = Callable[..., Any]


class Refused(NotImplementedError):
    """Something in `build` that cannot be put off."""


class Recorder(TorchDispatchMode):
    """Gives new CPU tensors of at least `min_bytes` no memory and records what writes them.

    Everything else runs as usual: views only have geometry, a value that is asked for is replayed
    (so that branches and loops on values take the path that they take without the recorder), and a
    random operator also runs once over scratch memory, which advances its generator.
    """

    def __init__(self, tape: Tape, min_bytes: int) -> None:
        super().__init__()
        self.tape = tape
        self._min_bytes = max(min_bytes, 1)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves, spec = tree_flatten((args, kwargs))
        if not any(map(self.tape.owns, leaves)):
            return self._create(func, args, kwargs, leaves)
        name = func._schema.name.partition("::")[2]
        if func.is_view or name in _GEOMETRY or torch.Tag.inplace_view in func.tags:
            if name.startswith("resize"):
                raise _refusal(func, "resizing a large tensor", "make it of its final size")
            if func is torch.ops.aten.set_.source_Tensor:
                _C.show(*args)  # torch's own reads the address
                return args[0]
            return func(*args, **kwargs)
        if func.namespace in _COLLECTIVES:
            raise _refusal(
                func,
                "collectives and DTensors inside of `build`",
                "parallelize the model without zerocore.deferred",
            )
        written = _written(func, args, kwargs)
        devices = (leaf for leaf in leaves if isinstance(leaf, torch.device))
        leaves_cpu = any(device.type != "cpu" for device in devices)
        if not written and (leaves_cpu or name in _READS):
            return self._run_real(func, leaves, spec)
        owned = [tensor for tensor in written if self.tape.owns(tensor)]
        if written and not owned:
            return self._run_real(func, leaves, spec)
        if torch.Tag.nondeterministic_seeded in func.tags and name not in _DRAWS_BY_SHAPE:
            if not owned:
                return self._run_real(func, leaves, spec)
            raise _refusal(
                func,
                "a random operator whose draws may depend on values",
                "draw with uniform_ or normal_ and compare, or write bernoulli(p) in place of "
                "bernoulli_(p)",
            )
        try:
            returned, same = _on_meta(func, leaves, spec)
        except NotImplementedError as error:
            if owned:
                raise _refusal(func, "an operator without a shape rule", "leave it out") from error
            return self._run_real(func, leaves, spec)
        except RuntimeError:
            if owned:
                raise  # what torch says about the arguments
            return self._run_real(func, leaves, spec)  # a shape that depends on values
        if not owned and not any(isinstance(t, torch.Tensor) for t in tree_flatten(returned)[0]):
            return self._run_real(func, leaves, spec)
        remembered = list(map(self._remembered, leaves))
        if len(owned) < len(written):  # of a list, some are real
            self._run_real(func, leaves, spec)
        return self._record(func, leaves, remembered, spec, returned, same, written)

    def _create(self, func: Any, args: tuple, kwargs: dict, leaves: list[Any]) -> Any:
        """A call on no tensor of the tape: it may make one."""
        name = func._schema.name.partition("::")[2]
        arguments = {argument.name for argument in func._schema.arguments}
        device = kwargs.get("device")
        from_real = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
        if (
            "device" not in arguments
            or (from_real and not name.startswith("new_") and not name.endswith("_like"))
            or (device is not None and torch.device(device).type != "cpu")
            or (device is None and any(_elsewhere(leaf) for leaf in leaves))
            or func is torch.ops.aten.scalar_tensor.default
        ):
            return func(*args, **kwargs)
        on_meta = kwargs | {"device": torch.device("meta")}
        if "generator" in kwargs:
            on_meta["generator"] = None
        like = func(*map(_to_meta, args), **on_meta)
        if like.untyped_storage().nbytes() < self._min_bytes:
            return func(*args, **kwargs)
        if "dtype" in arguments:
            kwargs = kwargs | {"dtype": like.dtype}
        leaves, spec = tree_flatten((args, kwargs))
        # Of tensors that new ones are made like, only the geometry counts.
        remembered = [blank(_to_meta(t)) if isinstance(t, torch.Tensor) else t for t in leaves]
        return self._record(func, leaves, remembered, spec, like, {}, [])

    def _run_real(self, func: Any, leaves: list[Any], spec: TreeSpec) -> Any:
        """Calls the operator on values."""
        tape = self.tape
        written = {id(leaf) for leaf in _written(func, *tree_unflatten(leaves, spec))}

        def value(leaf: Any) -> Any:
            if not tape.owns(leaf):
                return leaf
            now = tape.value_now(leaf)
            return now.clone() if id(leaf) in written else now

        args, kwargs = tree_unflatten(list(map(value, leaves)), spec)
        return func(*args, **kwargs)

    def _record(
        self,
        func: Any,
        leaves: list[Any],
        remembered: list[Any],
        spec: TreeSpec,
        returned: Any,
        same: dict[int, torch.Tensor],
        written: list[torch.Tensor],
    ) -> Any:
        """Puts a call on the tape; its result.

        Args:
            remembered: the leaves, as Entry has them.
            returned: the result on meta tensors.
            same: by id of a meta tensor in it, the argument that it is.
            written: the arguments that the call writes to.
        """
        tape = self.tape
        made, result_spec = tree_flatten(returned)
        tensors = [leaf for leaf in made if isinstance(leaf, torch.Tensor)]
        new = {id(t): tape.blank(t) for t in tensors if id(t) not in same}
        result = tree_unflatten([(new | same).get(id(leaf), leaf) for leaf in made], result_spec)
        name = func._schema.name.partition("::")[2]
        if name in _UNINITIALISED:
            return result
        owned = [leaf for leaf in leaves if tape.owns(leaf)]
        reads = {key_of(leaf) for leaf in owned}
        changed = {key_of(tensor) for tensor in written if tape.owns(tensor)}
        kills = {key_of(tensor) for tensor in new.values()}
        if name in _OVERWRITE and covers_storage(leaves[0]):
            sources = {key_of(leaf) for leaf in leaves[1:] if tape.owns(leaf)}
            if not changed & sources:
                kills |= changed
                reads = sources
        ids = {id(tensor) for tensor in written}
        entry = Entry(
            func=func,
            leaves=remembered,
            spec=spec,
            outs=[Geometry.of(new[id(t)]) if id(t) in new else None for t in tensors],
            reads=reads,
            writes=changed | {key_of(tensor) for tensor in new.values()},
            kills=kills,
            scribbles=frozenset(
                i for i, leaf in enumerate(leaves) if id(leaf) in ids and not tape.owns(leaf)
            ),
        )
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draw(entry, leaves, ids)
        else:
            tape.record(entry)
        return result

    def _remembered(self, leaf: Any) -> Any:
        if self.tape.owns(leaf):
            return Geometry.of(leaf)
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

    def _draw(self, entry: Entry, leaves: list[Any], written: set[int]) -> None:
        """Records a random call and runs it over scratch memory."""
        generators = (leaf for leaf in leaves if isinstance(leaf, torch.Generator))
        generator = next(generators, torch.default_generator)
        entry.draw = Draw(generator, generator.get_state())

        def scratch(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if not self.tape.owns(leaf):
                return leaf.clone()
            # What is read may be checked, a standard deviation for its sign: zeros are valid.
            make = torch.empty_strided if id(leaf) in written else _zeros_strided
            return make(leaf.size(), leaf.stride(), dtype=leaf.dtype)

        args, kwargs = tree_unflatten(list(map(scratch, leaves)), entry.spec)
        drawn = entry.func(*args, **kwargs)
        self.tape.record(entry)
        storage = drawn.untyped_storage()
        if len(entry.writes) == 1 and entry.kills == entry.writes and not entry.reads:
            (key,) = entry.writes
            if storage.nbytes() == self.tape.nbytes(key):
                self.tape.keep(key, storage)  # it is the value
        heap.freed(storage.nbytes())


class ReadsByHand(TorchFunctionMode):
    """Gives values to what reads memory past the operators, and refuses what would keep it."""

    _READS = frozenset(
        getattr(torch.Tensor, name)
        for name in ("tolist", "numpy", "__array__", "__repr__", "__reduce_ex__")
    )
    _REFUSED = frozenset(
        getattr(torch.Tensor, name)
        for name in ("data_ptr", "share_memory_", "pin_memory", "__dlpack__")
    )

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in self._READS | self._REFUSED or not self._tape.owns(args[0]):
            return func(*args, **kwargs)
        if func in self._REFUSED:
            raise Refused(
                "zerocore.deferred: expected no use of a large tensor's address inside of `build`, "
                f"got Tensor.{func.__name__}; do it after zerocore.shard, or leave it out"
            )
        tensor = args[0]
        with _disable_current_modes():
            value = self._tape.value_now(tensor).clone()
            if isinstance(tensor, torch.nn.Parameter):
                value = torch.nn.Parameter(value, tensor.requires_grad)
            else:
                value.requires_grad_(tensor.requires_grad)
            result = func(value, *args[1:], **kwargs)
        if func in (torch.Tensor.numpy, torch.Tensor.__array__):
            result.flags.writeable = False  # writes would be lost
        return result


def _refusal(func: Any, what: str, remedy: str) -> Refused:
    return Refused(
        f"zerocore.deferred: expected operators that can be run later, got {func} ({what}) on a "
        f"tensor that has no memory yet; {remedy}, or build without zerocore.deferred"
    )


def _written(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that a call writes to, by its schema."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        by_name = argument.kwarg_only or i >= len(args)
        value = kwargs.get(argument.name) if by_name else args[i]
        found += [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]
    return found


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _elsewhere(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def _zeros_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype).zero_()


def _on_meta(func: Any, leaves: list[Any], spec: TreeSpec) -> tuple[Any, dict[int, torch.Tensor]]:
    """The call on meta tensors; and by their ids, the tensors that they stand for."""
    same: dict[int, torch.Tensor] = {}
    stand_ins = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            stand_in = torch.empty_strided(
                leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta"
            )
            same[id(stand_in)] = leaf
            leaf = stand_in
        elif isinstance(leaf, torch.device):
            leaf = torch.device("meta")
        elif isinstance(leaf, torch.Generator):
            leaf = None
        stand_ins.append(leaf)
    args, kwargs = tree_unflatten(stand_ins, spec)
    returned = func(*args, **kwargs)
    kept = {id(leaf) for leaf in tree_flatten(returned)[0]}
    return returned, {i: leaf for i, leaf in same.items() if i in kept}
