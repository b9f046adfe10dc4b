"""zerocore.save."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import nn

from zerocore import _C, registry
from zerocore.checkpoint import background, values
from zerocore.checkpoint.background import Saving
from zerocore.checkpoint.checks import require_own_values
from zerocore.checkpoint.directory import Temporary, remove_older, remove_stale, require_free
from zerocore.checkpoint.files import Progress, Sum, Writer
from zerocore.checkpoint.format import OWN_BUFFERS, Path, make_metadata
from zerocore.checkpoint.model_contents import ModelContents, bring_to_rest
from zerocore.checkpoint.optimizer_contents import OptimizerContents
from zerocore.checkpoint.placement import Stored, copies_of, shard_of
from zerocore.checkpoint.shards import FlatShard
from zerocore.checkpoint.together import Together
from zerocore.ema import EMA
from zerocore.optimizer_state import copied
from zerocore.runtime import Sharded, logged

logger = logging.getLogger("zerocore")

LOG_SECONDS = 5.0  # a save that takes longer says how far it is


@dataclass
class Contents:
    """What this rank saves.

    Attributes:
        shards, objects: by path.
        aliases: further names of tensors.
        about: for the marker.
    """

    shards: dict[Path, FlatShard] = field(default_factory=dict)
    objects: dict[Path, Any] = field(default_factory=dict)
    aliases: dict[Path, Path] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def detach(self) -> None:
        """Copies to the CPU what training goes on with."""
        self.shards = {
            path: replace(shard, values=shard.values.to("cpu", copy=True))
            for path, shard in self.shards.items()
        }
        self.objects = {path: copied(value) for path, value in self.objects.items()}


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    async_: bool = False,
    keep: int | None = None,
    **extra: Any,
) -> FilePath | Saving:
    """Saves a checkpoint as a directory of torch.distributed.checkpoint, at once or not at all.

    Parameters, persistent buffers and optimizer state have their original names and full shapes:
    `model.<name>`, `optim.state.<name>.<key>`, `optim.param_groups.<i>.<option>`. `zerocore.load`
    reads it at any stage and on any number of ranks; FSDP2 and plain PyTorch read it with
    torch.distributed.checkpoint.load into `{"model": ..., "optim": ...}`. Every rank writes a part,
    from where the data is. Buffers are local to each rank: where they differ, others read the first
    rank's, and `zerocore.load` gives each rank its own on the same number of ranks. Random states
    of all ranks (Python, NumPy, torch, device) are saved too.

    Nothing has the name `path` before everything is durable; on any error it is never made, on all
    ranks, and other checkpoints are as they were. Unfinished directories of dead processes of this
    host, `*.tmp-<host>-*` beside `path`, are removed.

    A collective over the model's ranks, which share the directory that `path` is in.

    Args:
        path: where nothing is yet.
        optimizer: of parameters of `model`.
        async_: returns as soon as the state is copied (to the CPU: as much as this rank writes) and
            writes in the background. A save or load that comes before it is done waits for it.
        keep: removes the oldest complete zerocore checkpoints beside `path`, by the order in which
            they were saved, so that this many remain, the new one included. None: removes none.
        extra: by name, anything with `state_dict()` (schedulers, zerocore.GradScaler, zerocore.EMA,
            samplers), or a value that can be pickled. What differs between ranks is kept for each.

    Returns:
        `path`; with `async_` a handle whose `result()` waits for it, and raises what went wrong
        (else the next save does).

    Raises:
        FileExistsError: if there is something at `path`.
        OSError: if the directory cannot be written, on the rank where that is so.
        ValueError: for a model that is not sharded, an optimizer of other parameters, an extra
            value that cannot be pickled, ranks that disagree, or an error of another rank.
        RuntimeError: inside of `zerocore.gathered()`, or if a rank is lost.
    """
    caller = "zerocore.save"
    models = registry.require_sharded(model, caller)
    with logged(models, "checkpoint"):
        background.wait()  # it uses the same group
        together = Together(caller, models)
        final = FilePath(os.path.abspath(os.fspath(path)))
        same = [("path", final), ("keep", keep), ("async_", async_)]
        contents = _collect(together, final, model, models, optimizer, keep, extra, same)
        if not async_:
            _write(together, final, contents, keep)
            return FilePath(path)
        together.agree(lambda: (contents.detach(), None))
        return background.start(FilePath(path), lambda: _write(together, final, contents, keep))


def _collect(
    together: Together,
    final: FilePath,
    model: nn.Module,
    models: list[Sharded],
    optimizer: torch.optim.Optimizer | None,
    keep: int | None,
    extra: dict[str, Any],
    same: list[tuple[str, Any]],
) -> Contents:
    """What this rank is to save. Raises, on all ranks, if any of them cannot.

    Args:
        same: (name, value) of what has to be the same on all ranks.
    """
    caller = together.caller

    def prepare() -> tuple[Any, Any]:
        background.require_saved()
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"{caller}: keep: expected an integer of at least 1, got {keep!r}")
        for name in extra:
            if not name.isidentifier():
                raise ValueError(f"{caller}: extra values: expected a Python name, got {name!r}")
        if together.first:
            require_free(final)
        bring_to_rest(models, caller)
        require_own_values(models, caller)
        for sharded in models:
            if sharded.unloaded is not None and (error := sharded.unloaded.error()) is not None:
                raise error
        held = ModelContents(model, together.ranks[0])
        state, facts = None, []
        if optimizer is not None:
            state = OptimizerContents(model, models, optimizer, together.ranks[0], caller)
            facts = state.facts
        prints = {name: values.fingerprint(buffer) for name, buffer in held.buffers.items()}
        told = [*same, ("optimizer", type(optimizer).__name__)]
        told += [("extra", [(name, isinstance(extra[name], EMA)) for name in sorted(extra)])]
        told += [(s.names[0], (tuple(s.shard.whole), s.shard.values.dtype)) for s in held.tensors]
        if state is not None:
            told += [(f"param group {i}", options) for i, options in enumerate(state.options)]
        return (held, state), ([(what, repr(value)) for what, value in told], facts, prints)

    (held, state), everyone = together.agree(prepare)
    together.require_same([same for same, *_ in everyone])
    contents = Contents(about=_about(models))
    for stored in held.tensors:
        own, *others = [("model", name) for name in stored.names]
        contents.aliases |= {other: own for other in others}
        if (part := stored.to_save()) is not None:
            contents.shards[own] = part
    if together.first:
        contents.objects |= {("model", name): v for name, v in held.objects.items()}
        contents.objects["zerocore", "format"] = 1
    first_prints = everyone[0][2]
    for name, buffer in held.buffers.items():
        if everyone[together.index][2][name] != first_prints[name]:
            path = (*OWN_BUFFERS, str(together.index), name)
            contents.objects[path] = values.packed(name, buffer.cpu())
    if state is not None:
        ranked = list(zip(together.ranks, (facts for _, facts, _ in everyone), strict=True))
        tensors, objects = state.split(ranked)
        contents.objects |= objects
        for path, stored in tensors.items():
            if (part := stored.to_save()) is not None:
                contents.shards[path] = part
    averages = {name: value for name, value in extra.items() if isinstance(value, EMA)}
    for name, average in averages.items():
        _add_averages(contents, name, average, together.ranks[0])
    others = {name: value for name, value in extra.items() if name not in averages}
    contents.objects |= _extra_objects(together, others, models[0].device)
    return contents


def _add_averages(contents: Contents, name: str, average: EMA, first: int) -> None:
    """The averages of parameters are saved as the parameters are, and not gathered."""
    for names, entry, elements in average.own_elements():
        own, *others = [("extra", "averages", name, parameter) for parameter in names]
        contents.aliases |= {other: own for other in others}
        stored = Stored((own[-1],), shard_of(entry, elements), *copies_of(entry, first))
        if (part := stored.to_save()) is not None:
            contents.shards[own] = part


def _extra_objects(
    together: Together, extra: dict[str, Any], device: torch.device
) -> dict[Path, bytes]:
    """The user's values and the random state: once where all ranks have the same, else by rank."""

    def pack() -> tuple[dict[str, bytes], dict[str, str]]:
        states = values.states_of({name: extra[name] for name in sorted(extra)})
        packed = {name: values.packed(name, state) for name, state in states.items()}
        return packed, {name: values.fingerprint(state) for name, state in states.items()}

    packed, prints = together.agree(pack)
    index = str(together.index)
    objects: dict[Path, bytes] = {}
    for name, contents in packed.items():
        if all(other[name] == prints[0][name] for other in prints):
            if together.first:
                objects["extra", "shared", name] = contents
        else:
            objects["extra", "ranks", index, name] = contents
    objects["random", index] = values.packed("random state", values.random_state(device))
    return objects


def _about(models: list[Sharded]) -> dict[str, Any]:
    return {
        "zerocore": _C.BUILD["version"],
        "torch": torch.__version__,
        "models": [
            {
                "stage": sharded.options.stage,
                "shards": len(sharded.groups.ranks.shard),
                "replicas": len(sharded.groups.ranks.replicate),
                "units": sharded.units,
                "mixed_precision": repr(sharded.options.mixed_precision),
            }
            for sharded in models
        ],
    }


def _write(together: Together, final: FilePath, contents: Contents, keep: int | None) -> None:
    """Makes the checkpoint; a collective."""
    temporary: Temporary | None = None
    try:

        def begin(_: Progress) -> None:
            nonlocal temporary
            if together.first:
                remove_stale(final.parent)
                temporary = Temporary(final)

        together.work(begin)
        directory = FilePath(together.exchange(None, str(temporary and temporary.path))[0])

        def write(progress: Progress) -> Writer:
            return _write_part(directory, together.index, contents, progress)

        writer = together.work(write, _progress_log(final))
        parts = together.to_first((writer.saved, writer.sums))

        def commit(_: Progress) -> None:
            if together.first:
                saved = [part for own, _ in parts for part in own]
                files: dict[str, Sum] = {name: s for _, sums in parts for name, s in sums.items()}
                metadata = make_metadata(saved, contents.aliases)
                temporary.commit(metadata, files, len(together.ranks), contents.about)
                if keep is not None:
                    remove_older(final, keep)

        together.work(commit)
    finally:
        if temporary is not None:
            temporary.remove()


def _write_part(directory: FilePath, index: int, contents: Contents, progress: Progress) -> Writer:
    directory.mkdir(exist_ok=True)  # if it is not there, the first rank will miss these files
    with Writer(directory, f"__{index}_", progress) as writer:
        for path, value in contents.objects.items():
            writer.put_object(path, value)
        for path, shard in contents.shards.items():
            writer.put_shard(path, shard)
    return writer


def _progress_log(final: FilePath) -> Callable[[int], None]:
    """Says how far a long save is."""
    start = last = time.monotonic()

    def note(count: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LOG_SECONDS:
            last = now
            rate = count / (now - start) / 2**20
            logger.info("%s: %.0f MiB written, %.0f MiB/s", final, count / 2**20, rate)

    return note
