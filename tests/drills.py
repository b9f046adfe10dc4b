"""Ways in which one rank does something else than the others: drills for test_divergence.py.

In a drill rank 1 is the odd one, unless it says otherwise. As a program, it is one rank of one
drill: `drills.py NAME FOLDER`, with the environment that torchrun makes, or with RANK and
WORLD_SIZE and a store in FOLDER.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import models
import sharded
import torch
import torch.distributed as dist

import zerocore

TIMEOUT = float(os.environ.get("DRILL_SECONDS", "8"))
JOB = "transformer"


class Ended(NamedTuple):
    """How a drill ended on a rank."""

    error: str  # type of the exception; empty: none
    text: str
    seconds: float

    @property
    def verdict(self) -> str:
        """What all ranks have to say alike."""
        return self.text.splitlines()[0] if self.text else ""


class BadBatchError(Exception):
    """What a user's code may raise."""


def odd() -> bool:
    """Whether this is the rank that does something else."""
    return dist.get_rank() == 1


def train(stage: int, steps: int = 6, start: int = 0, **options) -> tuple:
    """A model and its optimizer after some steps."""
    model = sharded.shard(JOB, stage, timeout=TIMEOUT, **options)
    opt = zerocore.AdamW(model.parameters())
    for number in range(start, steps):
        sharded.step(model, opt, JOB, number)
    return model, opt


def go_on(model, opt, steps: int = 6, start: int = 2) -> None:
    """More steps."""
    for number in range(start, steps):
        sharded.step(model, opt, JOB, number)


def skips_a_unit(stage: int) -> None:
    """From the third step on, block 1 is left out."""
    model, opt = train(stage, 2)
    if odd():
        blocks = [model.blocks[0], model.blocks[2]]
        model.forward = lambda tokens: short_forward(model, tokens, blocks)
    go_on(model, opt)


def other_order(stage: int) -> None:
    """Blocks 0 and 1 change places."""
    model, opt = train(stage, 2)
    if odd():
        blocks = [model.blocks[1], model.blocks[0], model.blocks[2]]
        model.forward = lambda tokens: short_forward(model, tokens, blocks)
    go_on(model, opt)


def short_forward(model, tokens, blocks):
    """The transformer's forward over some of its blocks."""
    features = model.embed(tokens) + model.position[: tokens.shape[1]]
    for block in blocks:
        features = block(features)
    return model.head(model.norm(features))


def one_batch_fewer(stage: int) -> None:
    """The odd rank is done after 3 steps, and stays alive in code of its own; then it goes on."""
    model, opt = train(stage, 3 if odd() else 4)
    if odd():
        time.sleep(TIMEOUT + 3)
        go_on(model, opt, 4, 3)


def raises_and_goes_on(stage: int) -> None:
    """A forward that raises in block 1, caught; the next batch is the next of the others' too."""
    model, opt = train(stage, 2)

    def bad(*_):
        raise BadBatchError("label out of range")

    for number in range(2, 8):
        handle = model.blocks[1].fc1.register_forward_hook(bad) if odd() and number == 3 else None
        try:
            sharded.step(model, opt, JOB, number)
        except BadBatchError:
            handle.remove()


def backward_raises_and_goes_on(stage: int) -> None:
    """The same in backward."""
    model, opt = train(stage, 2)

    def fail(module, args, out):
        return models.Fails.apply(out)

    for number in range(2, 8):
        handle = None
        if odd() and number == 3:
            handle = model.blocks[1].fc1.register_forward_hook(fail)
        with contextlib.suppress(ArithmeticError):
            sharded.step(model, opt, JOB, number)
        if handle is not None:
            handle.remove()


def sleeps(stage: int) -> None:
    """Inside of block 1, longer than the timeout."""
    model, opt = train(stage, 2)

    def sleep(*_):
        time.sleep(TIMEOUT + 3)

    if odd():
        model.blocks[1].fc1.register_forward_hook(sleep)
    go_on(model, opt)


def clips_alone(stage: int) -> None:
    """Rank 0 clips the gradients, the other does not."""
    model, opt = train(stage, 2)
    for number in range(2, 4):
        models.loss_of(model, models.batch(JOB, dist.get_rank(), number)).backward()
        if not odd():
            zerocore.clip_grad_norm_(model, 1.0)
        opt.step()
        opt.zero_grad()


def saves_alone(stage: int) -> None:
    """Rank 0 takes a full state dict, the other goes on training."""
    model, opt = train(stage, 2)
    if not odd():
        model.state_dict()
    go_on(model, opt)


def saves_optimizer_alone(stage: int) -> None:
    """The same with the optimizer's state."""
    model, opt = train(stage, 2)
    if not odd():
        zerocore.optimizer_state_dict(model, opt)
    go_on(model, opt)


def never_shards(stage: int) -> None:
    """The odd rank does something else, and shards when the others have given up."""
    if odd():
        time.sleep(TIMEOUT + 3)
    train(stage, 1)


def shards_differently(what: str) -> None:
    """Another stage, dtype or number of parameters."""
    model = models.build(JOB)
    stage = 3
    if odd() and what == "stage":
        stage = 2
    if odd() and what == "dtype":
        model = model.double()
    if odd() and what == "parameters":
        del model.blocks[2]
    zerocore.shard(model, stage, timeout=TIMEOUT)


def in_block(model, action: Callable[[], None]) -> None:
    """The odd rank does something in the third forward of block 1, and is not heard of again."""
    calls = []

    def hook(*_):
        calls.append(1)
        if odd() and len(calls) == 3:
            action()

    model.blocks[1].fc1.register_forward_hook(hook)


def raises_and_dies(stage: int) -> None:
    """An exception that nobody catches."""

    def bad():
        raise BadBatchError("label out of range")

    model, opt = train(stage, 0)
    in_block(model, bad)
    go_on(model, opt, 6, 0)


def backward_raises_and_dies(stage: int) -> None:
    """The same in backward."""
    model, opt = train(stage, 2)
    if odd():
        model.register_forward_hook(lambda m, args, out: models.Fails.apply(out))
    go_on(model, opt)


def is_killed(stage: int) -> None:
    """By SIGKILL."""
    model, opt = train(stage, 0)
    in_block(model, lambda: os.kill(os.getpid(), signal.SIGKILL))
    go_on(model, opt, 6, 0)


def is_stopped(stage: int) -> None:
    """By SIGSTOP: the kernel keeps its connections open."""
    model, opt = train(stage, 0)
    in_block(model, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    go_on(model, opt, 6, 0)


def ends_early(stage: int) -> None:
    """One batch fewer, and the end of the script."""
    train(stage, 3 if odd() else 4)


def ends_well(stage: int) -> None:
    """All ranks take as many steps."""
    train(stage, 3)


def first_is_killed(stage: int) -> None:
    """Rank 0, which hosts the store."""
    model, opt = train(stage, 2)
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    go_on(model, opt)


def in_a_hybrid_mesh(stage: int) -> None:
    """Rank 1 of a 2 by 2 mesh sleeps: rank 2 shares no group of two with it."""
    model, opt = train(stage, 2, mesh=(2, 2))
    if odd():
        time.sleep(TIMEOUT + 3)
    go_on(model, opt)


def drill(name: str, argument: int | str) -> Ended:
    """Does one in the default group of now."""
    start = time.monotonic()
    try:
        globals()[name](argument)
    except Exception as error:
        return Ended(type(error).__name__, str(error), time.monotonic() - start)
    return Ended("", "", time.monotonic() - start)


def in_a_new_world(name: str, argument: int | str, store: str, log_dir: str = "") -> Ended:
    """Does one in a default group of its own, in a rank that lives on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    if log_dir:
        os.environ["ZEROCORE_LOG_DIR"] = log_dir
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    try:
        return drill(name, argument)
    finally:
        os.environ.pop("ZEROCORE_LOG_DIR", None)
        dist.destroy_process_group()
        dist.init_process_group("gloo", f"file://{store}.after", rank=rank, world_size=size)


def main(name: str, stage: str, folder: str) -> None:
    """One rank; what it ends with is in the folder."""
    torch.set_num_threads(1)
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo")
    else:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
    start = time.monotonic()
    path = pathlib.Path(folder, f"rank{dist.get_rank()}.json")
    try:
        globals()[name](int(stage))
    except Exception as error:
        ended = Ended(type(error).__name__, str(error), time.monotonic() - start)
        path.write_text(json.dumps(ended))
        raise
    path.write_text(json.dumps(Ended("", "", time.monotonic() - start)))


if __name__ == "__main__":
    main(*sys.argv[1:])
