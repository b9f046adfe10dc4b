"""Modes under which large tensors get no memory, and a tape remembers what writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
# They write to these arguments, although their schemas do not say so.
_WRITES_UNSAID = {
    "native_batch_norm": ("running_mean", "running_var"),
    "batch_norm_update_stats": ("running_mean", "running_var"),
}
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")


class Refused(NotImplementedError):
    """Something in `build` that cannot be put off."""


class _Call(NamedTuple):
    """An operator and its flattened (args, kwargs)."""

    func: Any
    leaves: list[Any]
    spec: TreeSpec

    @property
    def name(self) -> str:
        return self.func._schema.name.partition("::")[2]

    @property
    def draws(self) -> bool:
        """Whether it is a random operator."""
        return torch.Tag.nondeterministic_seeded in self.func.tags

    def written(self) -> list[torch.Tensor]:
        """The tensors that it writes to."""
        args, kwargs = tree_unflatten(self.leaves, self.spec)
        unsaid = _WRITES_UNSAID.get(self.name, ())
        found = []
        for i, argument in enumerate(self.func._schema.arguments):
            said = argument.alias_info is not None and argument.alias_info.is_write
            if not said and argument.name not in unsaid:
                continue
            by_name = argument.kwarg_only or i >= len(args)
            value = kwargs.get(argument.name) if by_name else args[i]
            found += [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]
        return found

    def run(self, change: Callable[[Any], Any]) -> Any:
        """Its result with `change` applied to the leaves."""
        args, kwargs = tree_unflatten(list(map(change, self.leaves)), self.spec)
        return self.func(*args, **kwargs)


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
        call = _Call(func, *tree_flatten((args, kwargs)))
        if not any(map(self.tape.owns, call.leaves)):
            return self._create(call, args, kwargs)
        if func.is_view or call.name in _GEOMETRY or torch.Tag.inplace_view in func.tags:
            if call.name.startswith("resize"):
                raise _refusal(func, "resizing a large tensor", "make it of its final size")
            if func is torch.ops.aten.set_.source_Tensor:
                _C.show(*args)  # torch's own reads the address
                return args[0]
            return func(*args, **kwargs)
        if any(map(_is_lazy, call.leaves)):
            call = self._without_lazy_bits(call)
        if func.namespace in _COLLECTIVES:
            raise _refusal(
                func,
                "collectives and DTensors inside of `build`",
                "parallelize the model without zerocore.deferred",
            )
        written = call.written()
        owned = [tensor for tensor in written if self.tape.owns(tensor)]
        by_value = call.name in _READS or any(map(_is_elsewhere, call.leaves))
        if (written or by_value) and not owned:
            return self._run_real(call)
        if call.draws and call.name not in _DRAWS_BY_SHAPE:
            if not owned:
                return self._run_real(call)
            raise _refusal(
                func,
                "a random operator whose draws may depend on values",
                "draw with uniform_ or normal_ and compare, or write bernoulli(p) in place of "
                "bernoulli_(p)",
            )
        try:
            returned, same = _on_meta(call)
        except NotImplementedError as error:
            if owned:
                raise _refusal(func, "an operator without a shape rule", "leave it out") from error
            return self._run_real(call)
        except RuntimeError:
            if owned:
                raise  # what torch says about the arguments
            return self._run_real(call)  # a shape that depends on values
        made = [leaf for leaf in tree_flatten(returned)[0] if isinstance(leaf, torch.Tensor)]
        dense = made and all(tensor.layout is torch.strided for tensor in made)
        if not owned and not dense:
            return self._run_real(call)
        remembered = list(map(self._remembered, call.leaves))
        if len(owned) < len(written):  # of a list, some are real
            self._run_real(call)
        return self._record(call, remembered, returned, same, written)

    def _create(self, call: _Call, args: tuple, kwargs: dict) -> Any:
        """A call on no tensor of the tape: it may make one."""
        func, name = call.func, call.name
        arguments = {argument.name for argument in func._schema.arguments}
        from_real = any(isinstance(leaf, torch.Tensor) for leaf in call.leaves)
        if (
            "device" not in arguments
            or (from_real and not name.startswith("new_") and not name.endswith("_like"))
            or any(map(_is_elsewhere, call.leaves))
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
        call = _Call(func, *tree_flatten((args, kwargs)))
        # Of tensors that new ones are made like, only the geometry counts.
        remembered = [
            blank(_to_meta(leaf)) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in call.leaves
        ]
        return self._record(call, remembered, like, {}, [])

    def _without_lazy_bits(self, call: _Call) -> _Call:
        """The same with conjugates and negatives computed, which some operators take as views."""
        if any(map(_is_lazy, call.written())):
            raise _refusal(
                call.func, "a write to a conjugate or negative view", "write to its base"
            )

        def computed(leaf: Any) -> Any:
            if not _is_lazy(leaf):
                return leaf
            negative, conjugate = leaf.is_neg(), leaf.is_conj()
            leaf = torch._neg_view(leaf) if negative else leaf
            leaf = torch._conj(leaf) if conjugate else leaf  # now without bits
            for is_set, func in (
                (conjugate, torch.ops.aten._conj_physical.default),
                (negative, torch.ops.aten.neg.default),
            ):
                leaf = self.__torch_dispatch__(func, (), (leaf,)) if is_set else leaf
            return leaf

        return call._replace(leaves=list(map(computed, call.leaves)))

    def _run_real(self, call: _Call) -> Any:
        """Calls the operator on values."""
        written = {id(tensor) for tensor in call.written()}

        def value(leaf: Any) -> Any:
            if not self.tape.owns(leaf):
                return leaf
            now = self.tape.value_now(leaf)
            return now.clone() if id(leaf) in written else now

        return call.run(value)

    def _record(
        self,
        call: _Call,
        remembered: list[Any],
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
        draw = drawn = None
        if call.draws:
            draw, drawn = self._draw(call, written)
            if not written:  # some meta kernels have other strides
                returned = torch.empty_strided(
                    drawn.size(), drawn.stride(), dtype=drawn.dtype, device="meta"
                )
        made, spec = tree_flatten(returned)
        tensors = [leaf for leaf in made if isinstance(leaf, torch.Tensor)]
        new = {id(t): tape.blank(t) for t in tensors if id(t) not in same}
        result = tree_unflatten([(new | same).get(id(leaf), leaf) for leaf in made], spec)
        if call.name in _UNINITIALISED:
            return result
        reads = {key_of(leaf) for leaf in call.leaves if tape.owns(leaf)}
        changed = {key_of(tensor) for tensor in written if tape.owns(tensor)}
        kills = {key_of(tensor) for tensor in new.values()}
        if call.name in _OVERWRITE and covers_storage(call.leaves[0]):
            sources = {key_of(leaf) for leaf in call.leaves[1:] if tape.owns(leaf)}
            if not changed & sources:
                kills |= changed
                reads = sources
        ids = {id(tensor) for tensor in written}
        entry = Entry(
            func=call.func,
            leaves=remembered,
            spec=call.spec,
            outs=[Geometry.of(new[id(leaf)]) if id(leaf) in new else None for leaf in made],
            reads=reads,
            writes=changed | {key_of(tensor) for tensor in new.values()},
            kills=kills,
            scribbles=frozenset(
                i for i, leaf in enumerate(call.leaves) if id(leaf) in ids and not tape.owns(leaf)
            ),
            draw=draw,
        )
        tape.record(entry)
        if drawn is not None:
            self._keep(entry, drawn.untyped_storage())
        return result

    def _remembered(self, leaf: Any) -> Any:
        if self.tape.owns(leaf):
            return Geometry.of(leaf)
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

    def _draw(self, call: _Call, written: list[torch.Tensor]) -> tuple[Draw, torch.Tensor]:
        """Runs a random call over scratch memory, which advances its generator; its result."""
        generators = (leaf for leaf in call.leaves if isinstance(leaf, torch.Generator))
        generator = next(generators, torch.default_generator)
        draw = Draw(generator, generator.get_state())
        ids = {id(tensor) for tensor in written}

        def scratch(leaf: Any) -> Any:
            if not self.tape.owns(leaf):
                return leaf
            # What is read may be checked, a standard deviation for its sign: zeros are valid.
            memory = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype)
            return memory if id(leaf) in ids else memory.zero_()

        return draw, call.run(scratch)

    def _keep(self, entry: Entry, storage: torch.UntypedStorage) -> None:
        """Caches what a random call has left in scratch memory, if it is the value."""
        if len(entry.writes) == 1 and entry.kills == entry.writes and not entry.reads:
            (key,) = entry.writes
            if storage.nbytes() == self.tape.nbytes(key):
                self.tape.keep(key, storage)
        heap.freed(storage.nbytes())


class ReadsByHand(TorchFunctionMode):
    """Gives values to what reads memory past the operators, and refuses what would keep it.

    Values are also given to functions that call other operators under a recorder than without one:
    singular values are computed with their vectors then, and rounded in another way.
    """

    _READS = frozenset(
        getattr(torch.Tensor, name) for name in ("tolist", "numpy", "__array__", "__repr__")
    )
    _SINGULAR_VALUES = frozenset(
        getattr(torch.linalg, name)
        for name in ("svdvals", "matrix_norm", "norm", "cond", "matrix_rank")
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
        if func is torch.Tensor.__deepcopy__ and self._tape.owns(args[0]):
            return _deep_copy(*args)
        if func in self._SINGULAR_VALUES or (
            func is torch.norm and "nuc" in (*args, *kwargs.values())
        ):
            return self._on_values(func, args, kwargs)
        if func not in self._READS | self._REFUSED or not self._tape.owns(args[0]):
            return func(*args, **kwargs)
        if func in self._REFUSED:
            raise Refused(
                "zerocore.deferred: expected no use of a large tensor's address inside of `build`, "
                f"got Tensor.{func.__name__}; do it after zerocore.shard, or leave it out"
            )
        result = self._on_values(func, args, kwargs)
        if func in (torch.Tensor.numpy, torch.Tensor.__array__):
            result.flags.writeable = False  # writes would be lost
        return result

    def _on_values(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Calls a function as without a recorder."""

        def value(leaf: Any) -> Any:
            if not self._tape.owns(leaf):
                return leaf
            now = self._tape.value_now(leaf).clone()
            if isinstance(leaf, torch.nn.Parameter):
                return torch.nn.Parameter(now, leaf.requires_grad)
            return now.requires_grad_(leaf.requires_grad)

        with _disable_current_modes():
            return _Call(func, *tree_flatten((args, kwargs))).run(value)


def _deep_copy(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """As copy.deepcopy, whose own way reads memory: tensors that share theirs go on to do so."""
    if id(tensor) not in memo:
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        whole = tensor.detach().as_strided((count,), (1,), 0)
        name = ("storage", key_of(tensor))
        if name not in memo:
            memo[name] = whole.clone()
        own = memo[name].view(tensor.dtype)
        copy = own.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        memo[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


def _refusal(func: Any, what: str, remedy: str) -> Refused:
    return Refused(
        f"zerocore.deferred: expected operators that can be run later, got {func} ({what}) on a "
        f"tensor that has no memory yet; {remedy}, or build without zerocore.deferred"
    )


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _is_lazy(value: Any) -> bool:
    """Whether it shows the conjugates or negatives of its elements in memory."""
    return isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg())


def _is_elsewhere(value: Any) -> bool:
    """Whether it is another device than the CPU, or a tensor there."""
    device = value.device if isinstance(value, torch.Tensor) else value
    return isinstance(device, torch.device) and device.type != "cpu"


def _on_meta(call: _Call) -> tuple[Any, dict[int, torch.Tensor]]:
    """The result on meta tensors; and by their ids, the arguments that they stand for."""
    same: dict[int, torch.Tensor] = {}
    stand_ins = []  # alive, so that ids are theirs

    def stand_in(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            meta = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
            same[id(meta)] = leaf
            stand_ins.append(meta)
            return meta
        if isinstance(leaf, torch.device):
            return torch.device("meta")
        return None if isinstance(leaf, torch.Generator) else leaf

    returned = call.run(stand_in)
    kept = {id(leaf) for leaf in tree_flatten(returned)[0]}
    return returned, {i: leaf for i, leaf in same.items() if i in kept}
