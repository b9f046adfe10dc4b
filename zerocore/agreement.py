"""What ranks tell each other on the host."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from zerocore import _C
from zerocore.journal import Journal


def gather_objects(caller: str, host: _C.Control, journal: Journal, value: Any) -> list[Any]:
    """What every rank has, in the order of ranks.

    Raises:
        ValueError: if another rank has called something else.
        torch.distributed.DistBackendError: if it fails.
    """
    data = bytearray(pickle.dumps((caller, value)))
    with journal.collective(caller):
        digest = torch.frombuffer(bytearray(hashlib.sha256(data).digest()), dtype=torch.int64)
        mine = torch.cat([torch.tensor([len(data)]), digest])
        digests = torch.stack(host.gather(_C.Topic.sizes, mine))
        # The same on all ranks, mostly; it would come, and be held, once from each of them.
        if bool((digests == mine).all()):
            return [value] * len(digests)
        sizes = digests[:, 0].tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        parts = host.gather(_C.Topic.values, padded)
    everyone = [
        pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)
    ]
    ranks = journal.circle.ranks
    for rank, (other, _) in zip(ranks, everyone, strict=True):
        if other != caller:
            raise ValueError(
                f"zerocore: expected all ranks to call the same functions in the same order, got a "
                f"difference: rank {dist.get_rank()} called {caller}, rank {rank} {other}"
            )
    return [value for _, value in everyone]


def agree(
    host: _C.Control,
    journal: Journal,
    error: Exception | None,
    facts: list[tuple[str, Any]],
) -> None:
    """Raises on every rank if one has an error, or if the facts of two ranks differ.

    Args:
        error: what is wrong on this rank, if anything.
        facts: (what, value) pairs that have to be equal everywhere; values are compared by `repr`.

    Raises:
        Exception: this rank's `error`.
        ValueError: for another rank's error, and for facts that differ: it names the first one.
    """
    mine = (repr(error) if error is not None else None, [(k, repr(v)) for k, v in facts])
    everyone = gather_objects("zerocore.shard", host, journal, mine)
    if error is not None:
        raise error
    order = journal.circle.ranks
    for rank, (theirs, _) in zip(order, everyone, strict=True):
        if theirs is not None:
            raise ValueError(f"zerocore.shard failed on rank {rank}: {theirs}")
    require_same("zerocore.shard", order, [values for _, values in everyone])


def require_same(
    caller: str, ranks: Sequence[int], everyone: Sequence[Sequence[tuple[str, str]]]
) -> None:
    """Raises ValueError, on every rank, if two ranks have called with something different.

    Args:
        everyone: (what, value) pairs of each of the ranks.
    """
    for rank, values in zip(ranks, everyone, strict=True):
        for expected, got in zip_longest(everyone[0], values, fillvalue=("nothing", "")):
            if expected != got:
                raise ValueError(
                    f"{caller}: expected the same call on every rank, got a difference: rank "
                    f"{ranks[0]} has {' '.join(expected)}, rank {rank} has {' '.join(got)}"
                )
