"""Whether a checkpoint has what a model needs."""

from __future__ import annotations

from collections.abc import Iterable

from zerocore.checkpoint.format import Catalog
from zerocore.checkpoint.placement import Stored
from zerocore.optimizer_places import some_of
from zerocore.runtime import Sharded


def require_own_values(models: Iterable[Sharded], caller: str) -> None:
    """Raises RuntimeError for models that show an average in place of their parameters."""
    if any(sharded.shows_average for sharded in models):
        raise RuntimeError(
            f"{caller}: expected a call outside of zerocore.EMA.applied(), where the model has its "
            "own parameters, got it inside"
        )


def prefix_of(catalog: Catalog, tensors: Iterable[Stored]) -> str:
    """What names of the model have in front in a checkpoint: "model.", or nothing if it is bare."""
    names = [name for stored in tensors for name in stored.names]
    return max(("model.", ""), key=lambda prefix: sum(prefix + name in catalog for name in names))


def found_keys(
    catalog: Catalog, prefix: str, tensors: Iterable[Stored], objects: Iterable[str]
) -> list[str]:
    """The key of each of the model's tensors; a tied one needs one of its names.

    Raises:
        ValueError: for names that are missing or unexpected, other shapes or dtypes. It names the
            first few.
    """
    problems: list[str] = []
    missing: set[str] = set()
    keys: list[str] = []
    known = {prefix + name for name in objects}
    for stored in tensors:
        known.update(prefix + name for name in stored.names)
        key = next((prefix + n for n in stored.names if prefix + n in catalog.tensors), None)
        if key is None:
            missing.add(stored.names[0])
            continue
        keys.append(key)
        saved = catalog.tensors[key]
        expected = (tuple(stored.shard.whole), stored.shard.values.dtype)
        if expected != (tuple(saved.size), saved.dtype):
            problems.append(
                f"{stored.names[0]!r} with the shape {expected[0]} in {expected[1]}, got "
                f"{tuple(saved.size)} in {saved.dtype}"
            )
    unexpected = {
        key.removeprefix(prefix)
        for key in catalog.keys()
        if key.startswith(prefix) and key not in known and not (prefix == "" and _other(key))
    }
    missing.update(name for name in objects if prefix + name not in catalog)
    if missing:
        problems.append(f"the model's names, got none of {some_of(missing)}")
    if unexpected:
        problems.append(f"the model's names only, got {some_of(unexpected)} too")
    if problems:
        shown = "; expected ".join(problems[:5])
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise ValueError(f"expected {shown}{more}, in {catalog.path}")
    return keys


def _other(key: str) -> bool:
    """Whether a key beside bare names is not the model's."""
    return key.partition(".")[0] in ("optim", "extra", "random", "zerocore")


def require_whole(catalog: Catalog, keys: Iterable[str]) -> None:
    """Raises ValueError for a tensor that is not stored as a whole."""
    for key in keys:
        if (hole := catalog.hole(key)) is not None:
            raise ValueError(f"expected all of {key!r} in {catalog.path}, got {hole}")
