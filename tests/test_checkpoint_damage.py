"""Checkpoints that are damaged, foreign or of another model: an error on all ranks, no change."""

import errno
import json
import os
import pickle
import shutil
import subprocess
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import make, state_of, steps, trained_and_saved, unchanged

import zerocore
from zerocore.checkpoint.files import _Stream

JOB, STAGE = "odd", 3


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "good"
    ranks(2, trained_and_saved, path, JOB, STAGE)
    return path


def errors_of_loads(paths, stage=STAGE, job=JOB, kind="zerocore"):
    """What loading from each path raises, in a model that must stay as it is."""
    model, opt = make(job, stage, kind, seed=4)
    steps(model, opt, job, range(2))
    messages = []
    for path in paths:
        with unchanged(model, opt):
            try:
                zerocore.load(path, model, opt)
                messages.append(None)
            except (ValueError, FileNotFoundError) as error:
                messages.append(str(error))
    steps(model, opt, job, range(2, 3))  # and goes on
    return messages


def truncate(path, name):
    os.truncate(path / name, (path / name).stat().st_size - 3)


def flip(path, name, share=0.5):
    with open(path / name, "r+b") as file:
        place = int((path / name).stat().st_size * share)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 16]))


def edit_marker(path):
    marker = json.loads((path / "zerocore.json").read_text())
    marker["world"] = 7
    (path / "zerocore.json").write_text(json.dumps(marker))


DAMAGE = {
    "truncated data": (lambda p: truncate(p, "__0_0.distcp"), "__0_0.distcp"),
    "truncated metadata": (lambda p: truncate(p, ".metadata"), ".metadata"),
    "a bit of rank 0's data": (lambda p: flip(p, "__0_0.distcp"), "__0_0.distcp"),
    "a bit of rank 1's data": (lambda p: flip(p, "__1_0.distcp", 0.9), "__1_0.distcp"),
    "a bit of the metadata": (lambda p: flip(p, ".metadata", 0.3), ".metadata"),
    "a bit of the marker": (lambda p: flip(p, "zerocore.json", 0.6), "marker"),
    "an edited marker": (edit_marker, "checksum"),
    "a missing file": (lambda p: (p / "__1_0.distcp").unlink(), "__1_0.distcp"),
    "missing metadata": (lambda p: (p / ".metadata").unlink(), ".metadata"),
    "a missing marker": (lambda p: (p / "zerocore.json").unlink(), "zerocore.json"),
    "only a marker of nothing": (lambda p: (p / "zerocore.json").write_text("{}"), "marker"),
    "no checkpoint": (
        lambda p: (shutil.rmtree(p), p.mkdir(), (p / "notes.txt").write_text("x")),
        "neither",
    ),
    "nothing": (shutil.rmtree, "no directory"),
}


def test_damage_is_found_before_anything_changes(ranks, saved, tmp_path):
    paths = []
    for name, (damage, _) in DAMAGE.items():
        paths.append(tmp_path / name.replace(" ", "_"))
        shutil.copytree(saved, paths[-1])
        damage(paths[-1])
    shutil.copytree(saved, tmp_path / "step.tmp-host-0123abcd")
    paths.append(tmp_path / "step.tmp-host-0123abcd")
    for messages in ranks(2, errors_of_loads, paths):
        for message, path, part in zip(
            messages, paths, [part for _, part in DAMAGE.values()] + ["never finished"], strict=True
        ):
            assert message is not None, path
            assert part in message and "zerocore.load" in message, message


def save_others(path):
    """Directories that torch.distributed.checkpoint writes, which do not fit."""
    model = zerocore.shard(torch.nn.Linear(3, 2), 3)
    opt = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    zerocore.save(path / "other", model, opt)
    full = state_of(model, opt)
    good = {"model": full.model, "optim": full.optimizer}

    def variant(name, **changes):
        dcp.save({**good, "model": {**full.model, **changes}}, checkpoint_id=path / name)

    variant("dtype", weight=full.model["weight"].double())
    variant("shape", weight=torch.zeros(3, 3))
    variant("more", stranger=torch.zeros(2))
    dcp.save({**good, "model": {"weight": full.model["weight"]}}, checkpoint_id=path / "less")
    group = full.optimizer["param_groups"][0]
    groups = [{**group, "params": ["weight"]}, {**group, "params": ["bias"]}]
    optim = {**full.optimizer, "param_groups": groups}
    dcp.save({**good, "optim": optim}, checkpoint_id=path / "groups")
    state = {name: {**v, "exp_avg": torch.zeros(9)} for name, v in full.optimizer["state"].items()}
    dcp.save({**good, "optim": {**full.optimizer, "state": state}}, checkpoint_id=path / "moments")
    dcp.save(good, checkpoint_id=path / "fits")
    return True


def errors_of_others(path, names):
    model = zerocore.shard(torch.nn.Linear(3, 2), 2)
    opt = zerocore.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    messages = []
    for name in names:
        with unchanged(model, opt):
            try:
                zerocore.load(path / name, model, opt)
                messages.append(None)
            except ValueError as error:
                messages.append(str(error))
    zerocore.load(path / "fits", model, opt)
    return messages


def test_others_that_do_not_fit(ranks, saved, tmp_path):
    ranks(2, save_others, tmp_path)
    for messages in ranks(2, errors_of_loads, [tmp_path / "other"]):
        assert "got none of empty, frozen" in messages[0]
        assert "names only, got bias, weight too" in messages[0]
    expected = {
        "dtype": "'weight' with the shape (2, 3) in torch.float32, got (2, 3) in torch.float64",
        "shape": "'weight' with the shape (2, 3) in torch.float32, got (3, 3)",
        "more": "stranger",
        "less": "bias",
        "groups": "1 param groups",
        "moments": "'exp_avg' of",
    }
    for messages in ranks(2, errors_of_others, tmp_path, list(expected)):
        for message, (name, text) in zip(messages, expected.items(), strict=True):
            assert message is not None and text in message, (name, message)


def errors_of_optimizers(path):
    """What loads into other optimizers raise; nothing changes."""
    model = zerocore.shard(torch.nn.Linear(3, 2), 2)
    optimizers = {
        "sgd": torch.optim.SGD(model.parameters(), lr=0.1),
        "nadam": torch.optim.NAdam(model.parameters()),
        "one rank's": torch.optim.AdamW(model.parameters()),
    }
    messages = []
    for name, opt in optimizers.items():
        for source in ("other", "fits"):
            with unchanged(model, opt):
                try:
                    mine = None if name == "one rank's" and dist.get_rank() else opt
                    zerocore.load(path / source, model, mine)
                    messages.append("no error")
                except ValueError as error:
                    messages.append(str(error))
    return messages


def test_state_of_other_optimizers(ranks, tmp_path):
    ranks(2, save_others, tmp_path)
    for messages in ranks(2, errors_of_optimizers, tmp_path):
        for message, text in zip(
            messages,
            ("like SGD, got Adam", "like SGD, got one without dampening, momentum")
            + ("like NAdam, got Adam", "like NAdam, got one without momentum_decay")
            + ("same call", "same call"),
            strict=True,
        ):
            assert text in message


def test_a_hole_in_the_metadata(ranks, tmp_path):
    ranks(2, save_others, tmp_path)
    shutil.copytree(tmp_path / "fits", tmp_path / "hole")
    metadata = pickle.loads((tmp_path / "hole" / ".metadata").read_bytes())
    chunk = metadata.state_dict_metadata["model.weight"].chunks[0]
    chunk.sizes = torch.Size((1, 3))
    (tmp_path / "hole" / ".metadata").write_bytes(pickle.dumps(metadata))
    os.truncate(tmp_path / "less" / "__0_0.distcp", 100)
    for messages in ranks(2, errors_of_others, tmp_path, ["hole", "less"]):
        assert "all of 'model.weight' in" in messages[0]
        assert "got 3 of its 6 elements" in messages[0]
        assert "__0_0.distcp" in messages[1]


def refused_saves(path, good):
    """Saves that cannot be; the errors, and what is left beside."""
    rank = dist.get_rank()
    model, opt = make(JOB, STAGE)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    calls = {
        "exists": lambda: zerocore.save(good, model, opt),
        "optimizer": lambda: zerocore.save(path / "a", model, other),
        "pickle": lambda: zerocore.save(path / "b", model, opt, hook=lambda: 0),
        "one rank's pickle": lambda: zerocore.save(
            path / "c", model, opt, hook=(lambda: 0) if rank else 0
        ),
        "keep": lambda: zerocore.save(path / "d", model, opt, keep=0 if rank else 1),
        "path": lambda: zerocore.save(path / f"rank{rank}", model, opt),
        "extra": lambda: zerocore.save(path / "f", model, opt, **{f"rank{rank}": 1}),
        "dots": lambda: zerocore.save(path / "e", model, opt, **{"a.b": 1}),
        "plain": lambda: zerocore.save(path / "g", torch.nn.Linear(2, 2)),
        "reserved": lambda: zerocore.save(path / "a.tmp-host-01234567", model, opt),
        "background": lambda: zerocore.save(path / "i", model, opt, async_=bool(rank)),
        "options": lambda: zerocore.save(path / "j", model, opt),
        "average": lambda: zerocore.save(path / "k", model, opt),
        "empty": lambda: zerocore.save(path / "l", zerocore.shard(blank, init="empty")),
    }
    with torch.device("meta"):
        blank = torch.nn.Linear(2, 2)
    average = zerocore.EMA(model, 0.9)
    messages = {}
    for name, call in calls.items():
        lr, opt.param_groups[0]["lr"] = opt.param_groups[0]["lr"], 1.0 + rank
        if name != "options":
            opt.param_groups[0]["lr"] = lr
        with average.applied() if name == "average" else unchanged(model, opt):
            try:
                call()
            except (ValueError, OSError, RuntimeError) as error:
                messages[name] = str(error)
        opt.param_groups[0]["lr"] = lr
    with zerocore.gathered(model):
        try:
            zerocore.save(path / "h", model, opt)
        except RuntimeError as error:
            messages["gathered"] = str(error)
    return messages


def test_saves_that_are_refused(ranks, saved, tmp_path):
    expected = {
        "exists": "exists",
        "optimizer": "not in the model",
        "pickle": "pickled",
        "one rank's pickle": "pickled",
        "keep": "keep",
        "path": "same call",
        "extra": "same call",
        "dots": "'a.b'",
        "plain": "zerocore.shard",
        "reserved": "unfinished",
        "background": "same call",
        "options": "same call",
        "average": "EMA.applied",
        "empty": "init='empty'",
        "gathered": "gathered",
    }
    before = sorted(saved.parent.iterdir())
    for messages in ranks(2, refused_saves, tmp_path, saved):
        for name, text in expected.items():
            assert text in messages.get(name, "not refused"), (name, messages.get(name))
    assert sorted(saved.parent.iterdir()) == before and list(tmp_path.iterdir()) == []


def save_twice(path, rank_that_fails=None):
    """The second time without room: on a full disk, or as one rank's system says."""
    model, opt = make("transformer", 3)
    steps(model, opt, "transformer", range(2))
    zerocore.save(path / "first", model, opt)
    message = ""

    def full(self, contents):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the disk")

    fails = dist.get_rank() == rank_that_fails
    with (
        unchanged(model, opt),
        mock.patch.object(_Stream, "_write", full) if fails else nullcontext(),
    ):
        try:
            zerocore.save(path / "second", model, opt, keep=1)
        except (OSError, ValueError) as error:
            message = f"{type(error).__name__} {error}"
    dist.barrier()
    left = sorted(p.name for p in path.iterdir() if p.is_dir())
    zerocore.load(path / "first", model, opt)
    return message, left, zerocore.latest(path).name


@pytest.mark.parametrize("rank_that_fails", [0, 1])
def test_one_rank_that_cannot_write(ranks, tmp_path, rank_that_fails):
    found = ranks(2, save_twice, tmp_path, rank_that_fails)
    for rank, (message, left, latest) in enumerate(found):
        kind = "OSError" if rank == rank_that_fails else "ValueError"
        assert message.startswith(kind) and "No space left" in message, message
        assert left == ["first"] and latest == "first"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 512 KiB: one checkpoint fits, a second one does not."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_disk_that_is_full(ranks, small_disk):
    for message, left, latest in ranks(2, save_twice, small_disk):
        assert "No space left" in message, message
        assert left == ["first"] and latest == "first"
