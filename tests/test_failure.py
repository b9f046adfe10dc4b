"""A rank that dies: the others end with an error in time, and no process stays behind."""

import gc
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import models
import pytest
import sharded
import torch
import torch.distributed as dist
from ranks import Pool, RankError

import zerocore

GROUP_SECONDS = 4.0
SLACK_SECONDS = 8.0  # of a loaded machine, for the steps before
WHERE = [(0, "backward"), (1, "step"), (3, "forward"), (3, "backward")]


def die(how):
    """Ends this rank at once, or after a silence in which it is alive but not heard of."""
    if how == "silent":
        time.sleep(2 * GROUP_SECONDS + SLACK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def lose_rank(stage, place, how, mesh=None):
    """Trains for ever; the last rank is lost in the second step, in the middle of `place`."""
    model = sharded.shard("transformer", stage, mesh=mesh)
    opt = zerocore.AdamW(model.parameters(), max_grad_norm=1.0)
    lost = dist.get_rank() == dist.get_world_size() - 1
    calls = []

    def hook(*_):
        calls.append(1)
        if lost and len(calls) == 2:
            die(how)

    if place == "forward":
        model.blocks[1].fc1.register_forward_hook(hook)
    elif place == "backward":
        model.blocks[1].fc1.register_full_backward_hook(hook)
    else:
        opt.register_step_pre_hook(hook)
    for number in range(1000):
        sharded.step(model, opt, "transformer", number)
    return "trained on without the lost rank"


@pytest.mark.parametrize("stage, place", WHERE)
def test_survivors_end_with_an_error(stage, place):
    survivors_end(3, stage, place, "killed")


def test_a_silent_rank_is_noticed_within_the_timeout():
    survivors_end(2, 3, "backward", "silent")


def test_survivors_of_a_hybrid_mesh_end():
    survivors_end(4, 3, "backward", "killed", (2, 2))


def survivors_end(size, stage, place, how, mesh=None):
    pool = Pool(size, group_seconds=GROUP_SECONDS)
    try:
        pool.run(running, 1)  # all have started, and imported what the case needs
        *survivors, lost = pool.outcomes(lose_rank, stage, place, how, mesh)
        for outcome in survivors:
            assert outcome.kind == "raised", outcome
            assert outcome.seconds < GROUP_SECONDS + SLACK_SECONDS, outcome
        if how == "killed":
            assert (lost.kind, lost.value) == ("died", -signal.SIGKILL)
        else:
            assert lost.kind in ("died", "hung"), "the lost rank was still silent"
    finally:
        codes = pool.close()
    assert codes[:-1] == [0] * (size - 1), "a survivor could not end by itself"
    assert not any(running(process.pid) for process in pool.processes)


def abort():
    """As the C library does where it finds its heap damaged."""
    if dist.get_rank() == 1:
        os.abort()
    return dist.get_rank()


def test_a_rank_that_aborts_says_where():
    pool = Pool(2)
    try:
        with pytest.raises(
            RankError, match=r"rank 1 of 2 died\n-6 at\n(.*\n)+.*, line \d+ in abort"
        ):
            pool.run(abort)
    finally:
        pool.close(0.0)


SCRIPT = """
    import os, sys
    sys.path[:0] = {paths!r}
    import torch, torch.distributed as dist, datetime
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={timeout}))
    import test_failure
    open(os.path.join(sys.argv[1], f"{{dist.get_rank()}}.pid"), "w").write(str(os.getpid()))
    test_failure.lose_rank(3, "backward", "killed")
"""


def running(pid):
    """Whether a process of this id exists and is no zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_torchrun_leaves_no_process_behind(tmp_path):
    script = tmp_path / "train.py"
    paths = [str(path) for path in pathlib.Path(__file__).parents[:2]]
    script.write_text(textwrap.dedent(SCRIPT.format(paths=paths, timeout=GROUP_SECONDS)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), str(tmp_path)], timeout=60, capture_output=True, text=True
    )
    assert done.returncode != 0
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2, done.stderr
    deadline = time.monotonic() + 5
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(running, pids))


def ends_cleanly():
    """A script that trains and ends without any farewell to zerocore."""
    model = sharded.shard("transformer", 3)
    opt = zerocore.AdamW(model.parameters())
    for number in range(2):
        sharded.step(model, opt, "transformer", number)
    torch.held = (model, opt)  # alive when the interpreter ends
    loss = sharded.step(model, None, "transformer", 2)
    return loss


def test_ranks_end_by_themselves_with_a_model_alive():
    pool = Pool(2)
    try:
        assert all(loss > 0 for loss in pool.run(ends_cleanly))
    finally:
        codes = pool.close(10.0)
    assert codes == [0, 0]


def drop_models(times):
    """Models that die while gathers for a backward that never comes are under way."""
    for _ in range(times):
        model = sharded.shard("transformer", 3)
        for number in range(2):
            x, target = models.batch("transformer", dist.get_rank(), number)
            out = model(x)
            if number == 0:  # the second forward looks ahead in the order of this pass
                models.loss_of(lambda _, out=out: out, (x, target)).backward()
        del model, out
        gc.collect()
    return sharded.step(sharded.shard("transformer", 3), None, "transformer", 0)


def test_models_may_die_with_messages_in_flight():
    pool = Pool(2, group_seconds=GROUP_SECONDS)
    try:
        assert all(loss > 0 for loss in pool.run(drop_models, 60))
    finally:
        pool.close()
