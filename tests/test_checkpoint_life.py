"""Checkpoints in the background, old ones, unfinished ones, and ranks that die while they save."""

import errno
import fcntl
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoints import assert_same_state, make, state_of, steps
from ranks import Pool
from test_failure import GROUP_SECONDS, SLACK_SECONDS

import zerocore
from zerocore.checkpoint import directory, files, together

JOB = "transformer"


def background(path, stage):
    """Steps go on while a save is held up; what it has is the state when it was called."""
    model, opt = make(JOB, stage)
    steps(model, opt, JOB, range(2))
    expected = state_of(model, opt)
    go_on = threading.Event()
    put = files.Writer.put_shard

    def held_up(self, *args):
        go_on.wait(60)
        put(self, *args)

    with mock.patch.object(files.Writer, "put_shard", held_up):
        saving = zerocore.save(path / "first", model, opt, async_=True)
        steps(model, opt, JOB, range(2, 4))
        assert not saving.done() and not (path / "first").exists()
        with pytest.raises(TimeoutError):
            saving.result(0.01)
        go_on.set()
        second = zerocore.save(path / "second", model, opt, async_=True)  # waits for the first
        assert saving.done()
        assert saving.result() == path / "first" and second.result() == path / "second"
    later = state_of(model, opt)
    zerocore.load(path / "second", model, opt)
    assert_same_state(state_of(model, opt), later)
    zerocore.load(path / "first", model, opt)
    assert_same_state(state_of(model, opt), expected)
    return zerocore.latest(path).name


@pytest.mark.parametrize("stage", [0, 3])
def test_saves_in_the_background(ranks, tmp_path, stage):
    assert ranks(2, background, tmp_path, stage) == ["second"] * 2


def background_errors(path):
    """An error of a background save comes up in result(), else in the next save."""
    model, opt = make(JOB, 3)
    rank = dist.get_rank()
    found = []

    def broken(self, view):
        raise OSError(5, "broken disk", "the disk")

    for told in (True, False):
        with mock.patch.object(files._Stream, "_write", broken if rank else files._Stream._write):
            saving = zerocore.save(path / "broken", model, opt, async_=True)
            while not saving.done():
                time.sleep(0.01)
        try:
            saving.result() if told else zerocore.save(path / "next", model, opt)
        except (OSError, ValueError, RuntimeError) as error:
            found.append(f"{type(error).__name__} {error}")
        dist.barrier()
        assert list(path.glob("[!s]*")) == []  # not the ranks' store
    zerocore.save(path / "last", model, opt)
    return found


def test_errors_in_the_background(ranks, tmp_path):
    for found in ranks(2, background_errors, tmp_path):
        assert len(found) == 2 and all("broken disk" in message for message in found), found
        assert found[1].startswith("RuntimeError") and "the save before this one" in found[1]


def many(path):
    """Saves several times with `keep`; the names that are left after each."""
    model, opt = make(JOB, 2)
    names = []
    with mock.patch.object(directory.time, "time_ns", return_value=5):  # a clock that stands still
        for number in range(4):
            zerocore.save(path / f"step{9 - number}", model, opt, keep=2)
            dist.barrier()
            names.append(sorted(p.name for p in path.iterdir()))
            dist.barrier()
    return names, zerocore.latest(path).name


def test_keep_and_latest(ranks, tmp_path):
    (tmp_path / "folder").mkdir()
    others = ["folder", "step0", "step7.tmp-elsewhere-00000000"]
    for name in others[1:]:
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").write_bytes(b"of others")
    assert zerocore.latest(tmp_path) is None and zerocore.latest(tmp_path / "none") is None
    for names, latest in ranks(2, many, tmp_path):
        left = [["step9"], ["step8", "step9"], ["step7", "step8"], ["step6", "step7"]]
        assert names == [sorted(others + some) for some in left]
        assert latest == "step6"  # by the order of saves, not of names or clocks
    os.truncate(tmp_path / "step6" / "__1_0.distcp", 10)
    assert zerocore.latest(tmp_path).name == "step7"
    (tmp_path / "step7" / "zerocore.json").write_text("{}")
    assert zerocore.latest(tmp_path) is None


def keeps_what_it_cannot_remove(path):
    """The names at the end, and what was said."""
    model = zerocore.shard(torch.nn.Linear(3, 2), 3)
    zerocore.save(path / "first", model)

    def rename(self, target, rename=Path.rename):
        if self.name == "first":
            raise PermissionError(errno.EPERM, "not yours", str(self))
        return rename(self, target)

    with mock.patch.object(Path, "rename", rename), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zerocore.save(path / "second", model, keep=1)
    return sorted(p.name for p in path.iterdir()), [str(warning.message) for warning in caught]


def test_a_checkpoint_that_cannot_be_removed(ranks, tmp_path):
    """The new one is complete, which an error would not say."""
    (names, said), (others, _) = ranks(2, keeps_what_it_cannot_remove, tmp_path)
    assert names == others == ["first", "second"]
    assert any("first cannot be removed" in text for text in said)


def test_what_is_removed_as_unfinished(tmp_path):
    old, young = time.time() - 3600, time.time()
    host = directory._host()

    def made(name, content=".metadata", moment=old):
        (tmp_path / name).mkdir()
        (tmp_path / name / content).write_bytes(b"")
        os.utime(tmp_path / name, (moment, moment))
        return tmp_path / name

    dead = made(f"a.tmp-{host}-01234567")
    stay = [
        made(f"b.tmp-{host}-01234567"),  # of a save that goes on
        made("c.tmp-elsewhere-01234567"),  # of another host
        made(f"d.tmp-{host}-01234567", "thesis.tex"),  # of a person
        made(f"e.tmp-{host}-01234567", moment=young),  # perhaps not locked yet
        made("f"),
    ]
    lock = os.open(stay[0], os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    directory.remove_stale(tmp_path)
    assert not dead.exists() and all(path.exists() for path in stay)
    os.close(lock)
    directory.remove_stale(tmp_path)
    assert not stay[0].exists() and all(path.exists() for path in stay[1:])


def die_while_saving(path, place):
    """The last rank is killed in the middle of a save that follows a good one."""
    model, opt = make(JOB, 3)
    zerocore.save(path / "good", model, opt)
    lost = dist.get_rank() == dist.get_world_size() - 1

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if lost and place == "writes":
        files.Writer.put_shard = die
    elif lost:
        together.Together.to_first = die
    started = time.monotonic()
    try:
        zerocore.save(path / "lost", model, opt)
    except (RuntimeError, ValueError) as error:
        return str(error), time.monotonic() - started, sorted(p.name for p in path.iterdir())
    return "saved without the lost rank", 0.0, []


@pytest.mark.parametrize("place", ["writes", "reports"])
def test_a_rank_that_dies_while_it_saves(tmp_path, place):
    pool = Pool(3, group_seconds=GROUP_SECONDS)
    try:
        *survivors, lost = pool.outcomes(die_while_saving, tmp_path, place)
    finally:
        pool.close(0.0)
    assert (lost.kind, lost.value) == ("died", -signal.SIGKILL)
    for outcome in survivors:
        # The case itself returned; the barrier after it failed, or was never reached.
        assert outcome.kind == "raised", outcome
        assert outcome.seconds < 2 * (GROUP_SECONDS + SLACK_SECONDS), outcome
    assert zerocore.latest(tmp_path).name == "good"
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


SCRIPT = """
    import os, sys
    sys.path[:0] = {paths!r}
    import torch, torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    import checkpoints, zerocore
    from pathlib import Path
    model, opt = checkpoints.make("transformer", 3)
    zerocore.save(Path(sys.argv[1]) / "last", model, opt, async_=True)
"""


def test_the_process_waits_for_its_save(tmp_path):
    script = tmp_path / "train.py"
    paths = [str(path) for path in Path(__file__).parents[:2]]
    script.write_text(textwrap.dedent(SCRIPT.format(paths=paths)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, str(script), str(tmp_path)], timeout=90, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert zerocore.latest(tmp_path).name == "last"


def slow(path):
    """Messages of a save that takes long."""
    model, opt = make(JOB, 3)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("zerocore")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    put = files.Writer.put_shard

    def slower(self, *args):
        time.sleep(0.02)
        put(self, *args)

    try:
        with (
            mock.patch.object(files.Writer, "put_shard", slower),
            mock.patch.object(sys.modules["zerocore.checkpoint.save"], "LOG_SECONDS", 0.2),
            mock.patch.object(together, "ROUND_SECONDS", 0.1),
        ):
            zerocore.save(path / "slow", model, opt)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return records


def test_a_long_save_says_how_far_it_is(ranks, tmp_path):
    first, second = ranks(2, slow, tmp_path)
    assert second == [] and len(first) >= 2
    assert all(re.search(r"slow: \d+ MiB written, \d+ MiB/s", message) for message in first)


def test_files_are_bounded(tmp_path):
    tensor = torch.randn(1000, 100)
    with mock.patch.object(files, "FILE_BYTES", 100_000):
        shard = files.FlatShard.of(tensor)
        with files.Writer(tmp_path, "__0_", files.Progress()) as writer:
            for number in range(10):
                writer.put_shard((f"t{number}",), shard.part(number, 10))
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes == {name: total.bytes for name, total in writer.sums.items()}
    assert len(sizes) > 3 and max(sizes.values()) < 200_000
    for name, total in writer.sums.items():
        assert files.sum_file(tmp_path / name, files.Progress()) == total
