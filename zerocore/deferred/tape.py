"""What writes the tensors of a deferred model: recorded once, replayed for one tensor at a time."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zerocore.deferred.blank import Geometry, blank, heap, is_plain, key_of


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The settings of the process that an operator's result depends on."""

    dtype: torch.dtype
    threads: int  # a sum is cut into as many parts

    @staticmethod
    def now() -> Surroundings:
        """Those of this moment."""
        return Surroundings(torch.get_default_dtype(), torch.get_num_threads())

    def apply(self) -> None:
        """Makes them the process's."""
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)


@dataclass(frozen=True, slots=True)
class Draw:
    """A random operator's generator and the state that it had."""

    generator: torch.Generator
    state: torch.Tensor  # 1-D uint8


@dataclass(slots=True)
class Entry:
    """One call of an operator on storages of the tape.

    Attributes:
        func: the operator.
        leaves, spec: its flattened (args, kwargs). Tensors of the tape are Geometry; others are
            copies of what they were.
        outs: of each leaf of what it returns, the Geometry if that is a new tensor, else None.
        reads, writes, kills: keys of storages that it reads, changes, and overwrites as a whole.
        scribbles: indices of the copies among `leaves` that the operator writes to.
        surroundings: under which it ran.
        draw: of a random operator.
    """

    func: torch._ops.OpOverload
    leaves: list[Any]
    spec: TreeSpec
    outs: list[Geometry | None]
    reads: set[int]
    writes: set[int]
    kills: set[int]
    scribbles: frozenset[int]
    surroundings: Surroundings = field(default_factory=Surroundings.now)
    draw: Draw | None = None

    def needs(self) -> set[int]:
        """Storages whose content before the call its result depends on."""
        return self.reads | (self.writes - self.kills)

    def touches(self) -> set[int]:
        """All storages of the tape that take part."""
        return self.reads | self.writes

    def run(self, real: dict[int, torch.UntypedStorage]) -> list[Any]:
        """Calls the operator on these storages; the leaves of what it returns."""

        def argument(i: int, leaf: Any) -> Any:
            if isinstance(leaf, Geometry):
                return leaf.over(real[leaf.key])
            return leaf.clone() if i in self.scribbles else leaf

        leaves = [argument(i, leaf) for i, leaf in enumerate(self.leaves)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        with _state_of(self.draw):
            self.surroundings.apply()
            returned = self.func(*args, **kwargs)
        return tree_flatten(returned)[0]


@contextlib.contextmanager
def _state_of(draw: Draw | None) -> Iterator[None]:
    """The generator is in the state of the draw inside, and as it was afterwards."""
    if draw is None:
        yield
        return
    before = draw.generator.get_state()
    draw.generator.set_state(draw.state)
    try:
        yield
    finally:
        draw.generator.set_state(before)


class Tape:
    """The storages of a deferred model and the calls that write them, in their order.

    [Note: replay] The content of a storage is what the calls leave that wrote it since it was last
    overwritten as a whole, and theirs depends on the storages that they read, as they were then. A
    replay runs exactly these calls, over fresh memory that is let go after its last use. Random
    calls start from the generator's state of then, so the draws are the same.

    Args:
        cache_bytes: storages that the running build has made real are kept up to this size: a
            value that is read again and again (in rejection sampling) is not made anew each time.

    Attributes:
        when_cleared: called by `clear`, once.
    """

    def __init__(self, cache_bytes: int) -> None:
        self.when_cleared: list[Callable[[], None]] = []
        self._cache_bytes = cache_bytes
        self._entries: list[Entry | None] = []
        # Held for as long as the tape needs them: their addresses are their names.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._writes: dict[int, list[int]] = {}  # indices of entries
        # Content after so many of the storage's writes, least recently used first.
        self._cache: OrderedDict[int, tuple[int, torch.UntypedStorage]] = OrderedDict()
        # Storages that have become real for good; shared by the tensors that shared the blank one.
        self._resident: dict[int, torch.UntypedStorage] = {}

    def __len__(self) -> int:
        return sum(entry is not None for entry in self._entries)

    def owns(self, value: object) -> bool:
        """Whether it is a tensor over one of the tape's storages."""
        return is_plain(value) and key_of(value) in self._storages

    def blank(self, like: torch.Tensor) -> torch.Tensor:
        """A new tensor of the tape, with the geometry of a meta tensor."""
        tensor = blank(like)
        self._storages[key_of(tensor)] = tensor.untyped_storage()
        self._writes[key_of(tensor)] = []
        return tensor

    def nbytes(self, key: int) -> int:
        """The size of a storage."""
        return self._storages[key].nbytes()

    def record(self, entry: Entry) -> None:
        """Adds a call, the latest one."""
        for key in entry.writes:
            self._writes[key].append(len(self._entries))
        for key in entry.kills:
            self._cache.pop(key, None)
        self._entries.append(entry)

    def keep(self, key: int, storage: torch.UntypedStorage) -> None:
        """Caches the present content of a storage, in place of the least recently used ones."""
        self._cache.pop(key, None)
        if storage.nbytes() > self._cache_bytes:
            return
        self._cache[key] = (len(self._writes[key]), storage)
        while sum(kept.nbytes() for _, kept in self._cache.values()) > self._cache_bytes:
            self._cache.popitem(last=False)

    def seal(self, tensors: Iterable[torch.Tensor]) -> None:
        """Ends the recording: what none of these tensors depends on is forgotten."""
        self._cache.clear()
        needed: set[int] = set()
        keys = {key_of(tensor) for tensor in tensors}
        for key in keys:
            needed.update(self._slice(key, {})[0])
        for i, entry in enumerate(self._entries):
            if i in needed:
                keys |= entry.touches()
            else:
                self._entries[i] = None
        for key in self._storages.keys() - keys:
            del self._storages[key], self._writes[key]

    def clear(self) -> None:
        """Forgets everything; the tape owns nothing any more."""
        self._entries.clear()
        for held in (self._storages, self._writes, self._cache, self._resident):
            held.clear()
        while self.when_cleared:
            self.when_cleared.pop()()

    @torch.no_grad()
    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with its content, over memory that is the caller's."""
        geometry = Geometry.of(tensor)
        storage = self._resident.get(geometry.key)
        if storage is None:
            storage = self._replay(geometry.key, keep=False)
        return _shown_as(tensor, geometry.over(storage))

    @torch.no_grad()
    def value_now(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `value`, for the running build: not to be written to, the tape may cache it."""
        geometry = Geometry.of(tensor)
        storage = self._replay(geometry.key, keep=True)
        self.keep(geometry.key, storage)
        return _shown_as(tensor, geometry.over(storage))

    @torch.no_grad()
    def resident(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `value`; tensors that shared a storage get the same one, so they share writes too."""
        geometry = Geometry.of(tensor)
        if geometry.key not in self._resident:
            self._resident[geometry.key] = self._replay(geometry.key, keep=False)
        return _shown_as(tensor, geometry.over(self._resident[geometry.key]))

    def _slice(
        self, key: int, cache: dict[int, tuple[int, torch.UntypedStorage]]
    ) -> tuple[list[int], set[int]] | None:
        """Indices of the calls that make a storage's content, and the cached ones they start from.

        None if a cached content is later than one that has to be read.
        """
        todo = [(key, len(self._entries))]
        picked: set[int] = set()
        start: set[int] = set()
        while todo:
            key, end = todo.pop()
            writes = self._writes[key]
            stop = bisect_left(writes, end)
            done = 0
            if key in cache:
                done = cache[key][0]
                if done > stop:
                    return None
            for i in reversed(writes[done:stop]):
                entry = self._entries[i]
                if i not in picked:
                    picked.add(i)
                    todo += [(other, i) for other in entry.needs() if other != key]
                if key in entry.kills:
                    break
            else:
                if key in cache:
                    start.add(key)
        return sorted(picked), start

    def _replay(self, key: int, keep: bool) -> torch.UntypedStorage:
        """The content of a storage, see [Note: replay]; `keep`: caches what was made on the way."""
        cache = dict(self._cache)
        order, start = self._slice(key, cache) or self._slice(key, {})
        real = {k: cache[k][1] for k in start}
        for k in start:
            self._cache.pop(k)  # a replay may write it
        last = {k: i for i in order for k in self._entries[i].touches()}
        real.setdefault(key, None)
        before = Surroundings.now()
        try:
            for i in order:
                entry = self._entries[i]
                self._run(entry, real)
                heap.freed(sum(map(self.nbytes, entry.touches())))
                for k in entry.touches():
                    if last[k] != i or k == key:
                        continue
                    storage = real.pop(k, None)
                    newest = self._writes[k][-1] if self._writes[k] else i + 1
                    if keep and storage is not None and newest <= i:
                        self.keep(k, storage)
        finally:
            before.apply()
        return real[key] if real[key] is not None else self._memory(key)

    def _memory(self, key: int) -> torch.UntypedStorage:
        return torch.UntypedStorage(self.nbytes(key))

    def _run(self, entry: Entry, real: dict[int, torch.UntypedStorage | None]) -> None:
        """Runs a call; the storages of new tensors become those that it returned, if they fit."""
        made = {out.key for out in entry.outs if out is not None}
        for key in entry.touches() - made:
            if real.get(key) is None:
                real[key] = self._memory(key)
        for out, tensor in zip(entry.outs, entry.run(real), strict=True):
            if out is None or tensor is None:  # some kernels leave out what nobody needs
                continue
            storage = tensor.untyped_storage()
            fits = storage.nbytes() == self.nbytes(out.key)
            if fits and tensor.stride() == out.stride and tensor.storage_offset() == out.offset:
                real[out.key] = storage
            else:
                real[out.key] = self._memory(out.key)
                out.over(real[out.key]).copy_(tensor)


def _shown_as(like: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """A view that shows conjugates or negatives where `like` does."""
    memory = memory.conj() if like.is_conj() else memory
    return torch._neg_view(memory) if like.is_neg() else memory
