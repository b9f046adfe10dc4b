"""The ranks of a checkpoint: what they tell each other, and how they wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from zerocore import collectives, registry
from zerocore import groups as process_groups
from zerocore.agreement import require_same
from zerocore.checkpoint.files import Progress
from zerocore.runtime import Sharded
from zerocore.world import this_rank

T = TypeVar("T")

ROUND_SECONDS = 2.0  # ranks that are not done yet say so this often


class Together:
    """All ranks that have a part of a model, on a group of their own.

    Attributes:
        ranks: their global numbers, in order.
        index: which of them this is.

    Raises:
        ValueError: if a submodule's ranks are not the model's: its copies may differ.
    """

    def __init__(self, caller: str, models: Iterable[Sharded]) -> None:
        self.caller = caller
        models = list(models)
        self._groups = process_groups.checkpoint_groups(
            caller,
            [sharded.groups for sharded in models],
            _tensor_parallel_ranks(models),
        )
        self.ranks = self._groups.ranks.all
        self.index = self.ranks.index(this_rank())

    @property
    def first(self) -> bool:
        """Whether this rank does what one has to do for all."""
        return self.index == 0

    def exchange(self, error: Exception | None, value: Any = None) -> list[Any]:
        """Every rank's value, by index; a collective.

        Raises:
            Exception: this rank's `error`.
            ValueError: for another rank's.
        """
        try:
            [everyone] = collectives.exchange(self.caller, [self._groups], error, [value])
        except RuntimeError as caught:
            if caught is error:
                raise
            raise self._lost(caught) from caught
        return [value for _, value in everyone]

    def require_same(self, everyone: list[list[tuple[str, str]]]) -> None:
        """Raises ValueError, on every rank, if two ranks have called with something different.

        Args:
            everyone: (what, value) pairs of every rank, by index.
        """
        require_same(self.caller, self.ranks, everyone)

    def to_first(self, value: Any) -> list[Any]:
        """Every rank's value, by index, on the first rank; nothing on others. A collective."""
        try:
            return collectives.gather_to_first(self.caller, value, self._groups)
        except RuntimeError as caught:
            raise self._lost(caught) from caught

    def _named(self, error: Exception) -> Exception:
        """The error, with what the user called in front."""
        if str(error).startswith("zerocore."):
            return error
        if isinstance(error, OSError) and error.errno is not None:
            text = f"{self.caller}: {error.strerror}"
            named: Exception = type(error)(error.errno, text, error.filename)
        elif type(error) in (ValueError, TypeError, NotImplementedError, FileExistsError):
            named = type(error)(f"{self.caller}: {error}")
        else:
            named = RuntimeError(f"{self.caller}: {error!r}")
        named.__cause__ = error
        return named

    def _lost(self, error: RuntimeError) -> RuntimeError:
        """Ends the group, so that ranks that wait for this one are told as well."""
        process_groups.discard(self._groups)
        return RuntimeError(
            f"{self.caller}: expected ranks {self.ranks} to stay until the end, got the loss of "
            f"one, or a silence: {error}"
        )

    def work(self, task: Callable[[Progress], T], note: Callable[[int], None] | None = None) -> T:
        """Runs a task of this rank's on a thread; returns when all ranks are done with theirs.

        Meanwhile the ranks tell each other that they are alive: however long it takes, no wait is
        long, and what fails on one of them ends the others.

        Args:
            note: given the bytes of all ranks after each round, on the first one.

        Raises:
            Exception: what the task raised.
            ValueError: if another rank's failed.
        """
        progress = Progress()
        results: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                with torch.no_grad():
                    results.append(task(progress))
            except Exception as error:
                errors.append(self._named(error))

        thread = threading.Thread(target=run, name=self.caller)
        thread.start()
        try:
            while True:
                thread.join(ROUND_SECONDS)
                done = not thread.is_alive()  # asked first: then there is no error to come
                states = self.exchange(errors[0] if errors else None, (done, progress.bytes))
                if note is not None and self.first:
                    note(sum(count for _, count in states))
                if all(done for done, _ in states):
                    return results[0]
        finally:
            progress.cancelled = True
            thread.join()

    def agree(self, task: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
        """Runs a task, which gives what is kept here, and what every rank is told; a collective.

        Raises:
            Exception: what the task raised.
            ValueError: if another rank's failed.
        """
        kept, told, error = None, None, None
        try:
            kept, told = task()
        except Exception as caught:  # whatever it is, the other ranks must hear of it
            error = self._named(caught)
        return kept, self.exchange(error, told)


def _tensor_parallel_ranks(models: Iterable[Sharded]) -> list[int]:
    """Ranks that share parameters of this one by tensor parallelism."""
    ranks: set[int] = set()
    for sharded in models:
        for param in sharded.params():
            how = registry.entry_of(param).tensor_parallel
            if how is not None:
                ranks.update(how.mesh.mesh.flatten().tolist())
    return sorted(ranks)
