"""Conversions that cannot succeed: what they say, and that they leave nothing behind."""

import json
import os
import pathlib
import pickle
import re
import resource
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from saved_states import optimizer, tensors

from zerocore import __main__
from zerocore.__main__ import main
from zerocore.convert import export_checkpoint, files, import_checkpoint, safetensors

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture
def saved(tmp_path):
    """A checkpoint with {"model": ..., "optim": ...}."""
    folder = tmp_path / "saved"
    dcp.save({"model": tensors(), "optim": optimizer()}, checkpoint_id=folder)
    return folder


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def unchanged(tmp_path):
    """`unchanged(run, error, match)`: it raises, and every file is as it was."""

    def check(run, error, match):
        before = contents(tmp_path)
        with pytest.raises(error, match=match):
            run()
        assert contents(tmp_path) == before

    return check


@pytest.mark.parametrize(
    ("out", "options", "error", "match"),
    [
        ("out", {}, ValueError, r"out: expected FILE.safetensors, FILE.pt, or a folder .*, got"),
        ("out.txt", {}, ValueError, r"out: expected FILE.safetensors, FILE.pt, or a folder"),
        ("out", {"shard_bytes": 0}, ValueError, "shard_bytes: expected at least 1, got 0"),
        ("out.pt", {"shard_bytes": 9}, ValueError, "out: expected a folder .* the name"),
        ("old", {"shard_bytes": 9}, ValueError, "out: expected a folder .* got the file"),
        ("a/b/out.pt", {}, ValueError, "expected a folder .*/a to put b in, got none"),
        ("a/b/out", {"shard_bytes": 9}, ValueError, "expected a folder .*/a/b to put out in"),
        ("out.safetensors", {"optimizer": True}, ValueError, "optimizer: expected .* FILE.pt, got"),
        ("old.pt", {}, FileExistsError, "out: expected a new name, got .*old.pt, which exists"),
        ("dir.pt", {"force": True}, ValueError, "out: expected a file, got the folder"),
    ],
)
def test_out_is_checked(tmp_path, saved, unchanged, out, options, error, match):
    (tmp_path / "old.pt").write_bytes(b"precious")
    (tmp_path / "old").write_bytes(b"precious")
    (tmp_path / "dir.pt").mkdir()
    unchanged(lambda: export_checkpoint(saved, tmp_path / out, **options), error, match)


def test_other_folders_are_no_checkpoints(tmp_path, unchanged):
    (tmp_path / "folder").mkdir()
    for name, got in (("folder", "got one without the file .metadata"), ("none", "no directory")):
        unchanged(
            lambda name=name: export_checkpoint(tmp_path / name, tmp_path / "out.pt"),
            ValueError,
            f"{name}: expected a directory that torch.distributed.checkpoint wrote, .*{got}",
        )


def test_what_a_checkpoint_does_not_have(tmp_path, unchanged):
    out = tmp_path / "out.pt"
    dcp.save({"model": tensors()}, checkpoint_id=tmp_path / "a")
    unchanged(
        lambda: export_checkpoint(tmp_path / "a", out, optimizer=True),
        ValueError,
        "optimizer: expected a checkpoint with 'optim', got none in it",
    )
    dcp.save({"optim": optimizer()}, checkpoint_id=tmp_path / "b")
    unchanged(
        lambda: export_checkpoint(tmp_path / "b", out),
        ValueError,
        r"directory: expected a model's state dict, alone or as 'model', got \['optim'\]",
    )
    dcp.save({"w": torch.ones(2, dtype=torch.complex128)}, checkpoint_id=tmp_path / "c")
    unchanged(
        lambda: export_checkpoint(tmp_path / "c", tmp_path / "out.safetensors"),
        ValueError,
        r"w: expected a dtype of the safetensors format, got torch.complex128; export to a .pt",
    )


def test_damage_to_a_checkpoint_is_found(tmp_path, saved, unchanged):
    out, data = tmp_path / "out.pt", saved / "__0_0.distcp"
    intact = data.read_bytes()
    where = intact.index(tensors()["a.weight"].numpy().tobytes())
    flipped = bytearray(intact)
    flipped[where + 3] ^= 1
    data.write_bytes(flipped)
    export = lambda: export_checkpoint(saved, out)  # noqa: E731
    unchanged(export, RuntimeError, r"__0_0.distcp: expected checksum .*; the file is damaged")
    data.write_bytes(intact[: where + 8])
    unchanged(export, RuntimeError, r"expected \d+ bytes in .*__0_0.distcp, got \d+; .* damaged")
    data.write_bytes(b"x" * len(intact))
    unchanged(export, RuntimeError, r"__0_0.distcp: expected .* bytes from byte \d+ on that torch")
    data.unlink()
    unchanged(export, RuntimeError, "expected the file .*__0_0.distcp, got .*; .* damaged")


def test_damaged_metadata_is_found(tmp_path, saved, unchanged):
    path = saved / ".metadata"
    intact = path.read_bytes()
    export = lambda: export_checkpoint(saved, tmp_path / "out.pt")  # noqa: E731
    for content in (b"", intact[: len(intact) // 2], b"text", pickle.dumps({"a": 1})):
        path.write_bytes(content)
        unchanged(export, RuntimeError, r"\.metadata: expected the metadata of a checkpoint, got")
    path.write_bytes(intact)
    metadata = pickle.loads(intact)
    metadata.state_dict_metadata["model.a.weight"].size = torch.Size([8, 5])
    path.write_bytes(pickle.dumps(metadata))
    unchanged(export, RuntimeError, "expected chunks that make up model.a.weight of shape")


def test_transformed_files_are_refused(tmp_path, saved, unchanged):
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.zstd/1"]
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    unchanged(
        lambda: export_checkpoint(saved, tmp_path / "out.pt"),
        RuntimeError,
        r"expected plain files, got model.* transformed by \['stream.zstd/1'\]",
    )


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("where", ["metadata", "import"])
def test_pickles_run_no_code(tmp_path, saved, unchanged, where):
    evil = Hostile(tmp_path / "evil")
    if where == "metadata":
        (saved / ".metadata").write_bytes(pickle.dumps(evil))
        run = lambda: export_checkpoint(saved, tmp_path / "out.pt")  # noqa: E731
    else:
        torch.save({"w": torch.ones(1), "x": evil}, tmp_path / "in.pt")
        run = lambda: import_checkpoint(tmp_path / "in.pt", tmp_path / "out")  # noqa: E731
    unchanged(run, RuntimeError, "expected .* got UnpicklingError")


def write_safetensors(path, header, data=b"\0" * 8, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((length or len(text)).to_bytes(8, "little") + text + data)


def field(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "options", "match"),
    [
        ({}, {"data": b"", "length": 10**15}, "expected a safetensors file, got"),
        (b"{", {}, "expected the header of a safetensors file, got JSONDecodeError"),
        (b"\xff", {}, "expected the header of a safetensors file, got UnicodeDecodeError"),
        ([], {}, "expected the header of a safetensors file"),
        ({"a": 3}, {}, "expected the header of a safetensors file"),
        ({"a": field(dtype="X3")}, {}, "the dtype 'X3' of a"),
        ({"a": field(shape=[-2])}, {}, "the shape"),
        ({"a": field(shape=[3])}, {}, r"8 bytes of a of shape \[3\] in F32"),
        (
            {"a": field(offsets=[4, 12])},
            {},
            "expected a tensor at byte 0 .*, got one at 4",
        ),
        ({"a": field(), "b": field()}, {}, "expected a tensor at byte 8 .*, got one at 0"),
        ({"a": field()}, {"data": b"1234"}, r"expected \d+ bytes, got \d+; it is cut off"),
        ({"a": field()}, {"data": b"1" * 12}, r"expected \d+ bytes, got \d+"),
    ],
)
def test_damaged_safetensors_files(tmp_path, unchanged, header, options, match):
    path = tmp_path / "in.safetensors"
    write_safetensors(path, header, **options)
    unchanged(lambda: import_checkpoint(path, tmp_path / "out"), RuntimeError, match)


def test_the_damage_is_what_is_refused(tmp_path):
    write_safetensors(tmp_path / "in.safetensors", {"a": field()})
    (entry,) = safetensors.read(tmp_path / "in.safetensors")
    assert (entry.name, entry.shape, entry.dtype) == ("a", (2,), torch.float32)


def test_damaged_torch_files(tmp_path, unchanged):
    path = tmp_path / "in.pt"
    torch.save(tensors(), path)
    intact = path.read_bytes()
    where = intact.index(tensors()["a.weight"].numpy().tobytes())
    flipped = bytearray(intact)
    flipped[where] ^= 128
    run = lambda: import_checkpoint(path, tmp_path / "out")  # noqa: E731
    path.write_bytes(flipped)
    unchanged(run, RuntimeError, r"in.pt: expected checksum .*; the file is damaged")
    for content in (intact[:-100], intact[: where + 10], b"PK\3\4", b"\x80\2"):
        path.write_bytes(content)
        unchanged(run, RuntimeError, r"in.pt: expected .* torch.load\(weights_only=True\) reads")
    for content in (b"", b"text"):
        path.write_bytes(content)
        unchanged(run, RuntimeError, r"in.pt: expected a file of torch.save, got b'")


def test_sources_that_hold_no_weights(tmp_path, saved, unchanged):
    (tmp_path / "folder").mkdir()
    (tmp_path / "in.txt").write_text("")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    for name, match in (
        ("missing", "source: expected a file or a folder, got .*missing, which is not there"),
        ("folder", "folder: expected one of model.safetensors, .* in it, got none"),
        ("in.txt", "source: expected FILE.safetensors, FILE.pt, .* or a folder, got .*in.txt"),
        ("list.pt", "source: expected a state dict in .*list.pt, got list"),
        ("none.pt", "source: expected tensors in .*none.pt, got none"),
        ("saved", "source: expected other than a checkpoint directory, got .*saved"),
    ):
        unchanged(
            lambda name=name: import_checkpoint(tmp_path / name, tmp_path / "out"),
            ValueError,
            match,
        )
    torch.save({"w": torch.ones(1)}, tmp_path / "in.pt")
    unchanged(
        lambda: import_checkpoint(tmp_path / "in.pt", tmp_path / "a" / "b"),
        ValueError,
        "expected a folder .*/a to put b in, got none",
    )
    unchanged(
        lambda: import_checkpoint(tmp_path / "in.pt", saved),
        FileExistsError,
        "directory: expected a new one, got .*saved, which exists",
    )


def test_indexes_and_files_must_agree(tmp_path, saved, unchanged):
    folder = tmp_path / "folder"
    export_checkpoint(saved, folder, shard_bytes=100)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    first, *_, last = sorted(set(weight_map.values()))
    assert weight_map["a.weight"] == first
    run = lambda: import_checkpoint(folder, tmp_path / "out")  # noqa: E731
    for change, match in (
        ({"a.weight": last}, f"expected a.weight in {last}, got no tensor of this name"),
        ({"more": first}, f"expected more in {first}, got no tensor of this name"),
        ({"more": "model-9.safetensors"}, "expected the file model-9.safetensors beside it"),
        ({"more": "../saved"}, "the file name '../saved'"),
        ({"more": 3}, "expected the index of a folder of weights"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map | change}))
        unchanged(run, RuntimeError, match)
    index.write_text("{}")
    unchanged(run, RuntimeError, "expected the index of a folder of weights, got KeyError")


@pytest.mark.parametrize("target", ["out.safetensors", "out.pt", "out", "imported"])
def test_an_interrupted_conversion_leaves_nothing(tmp_path, saved, unchanged, target):
    torch.save(tensors(), tmp_path / "in.pt")

    def interrupt(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    if target == "imported":
        run = lambda: import_checkpoint(  # noqa: E731
            tmp_path / "in.pt", tmp_path / "imported", progress=interrupt
        )
    else:
        shards = {"shard_bytes": 100} if target == "out" else {}
        run = lambda: export_checkpoint(  # noqa: E731
            saved, tmp_path / target, progress=interrupt, **shards
        )
    unchanged(run, KeyboardInterrupt, "")


def test_space_is_looked_at_first(tmp_path, saved, unchanged, monkeypatch):
    torch.save(tensors(), tmp_path / "in.pt")
    usage = files.shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage)
    for run in (
        lambda: export_checkpoint(saved, tmp_path / "new" / "out.pt"),
        lambda: export_checkpoint(saved, tmp_path / "new" / "out", shard_bytes=10),
        lambda: import_checkpoint(tmp_path / "in.pt", tmp_path / "new" / "out"),
    ):
        unchanged(run, OSError, r"expected [\d,]+ free bytes, got 100")


def command(*arguments, **options):
    """Runs `python -m zerocore` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "zerocore", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


@pytest.mark.parametrize("kind", ["export", "import"])
def test_a_full_disk(tmp_path, unchanged, kind):
    # A limit on the size of files fails as a full disk does, after a part was written.
    state = {str(i): torch.full((1 << 18,), float(i)) for i in range(4)}
    if kind == "export":
        dcp.save(state, checkpoint_id=tmp_path / "in")
    else:
        torch.save(state, tmp_path / "in.pt")
    before = contents(tmp_path)
    source, target = ("in", "out.safetensors") if kind == "export" else ("in.pt", "out")
    result = command(
        kind,
        tmp_path / source,
        tmp_path / target,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20)),
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert "File too large" in result.stderr and "Traceback" not in result.stderr
    assert contents(tmp_path) == before


TERMINATED = """
import os, signal, sys
from zerocore.__main__ import main
from zerocore.convert import safetensors

def write_and_die(*arguments, write=safetensors.write):
    write(*arguments)
    assert len(os.listdir("out")) == 1
    os.kill(os.getpid(), signal.SIGTERM)

safetensors.write = write_and_die
main(["export", "saved", "out/x.safetensors"])
print("not terminated")
"""


def test_a_terminated_command_leaves_nothing(tmp_path, saved):
    (tmp_path / "out").mkdir()
    before = contents(tmp_path)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TERMINATED],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stdout) == (128 + signal.SIGTERM, ""), result.stderr
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["export", "saved", "out.pt"], 0, ""),
        (["export", "saved", "out/"], 0, ""),
        (["export", "saved", "out", "--shard-bytes", "1e2"], 0, ""),
        (["export", "saved", "out.safetensors", "--dtype", "bf16"], 0, ""),
        (["import", "in.pt", "out", "--dtype", "fp32", "--prefix", "x."], 0, ""),
        (["export", "nothing", "out.pt"], 2, "zerocore export: nothing: expected a directory that"),
        (["export", "saved", "in.pt"], 2, "out: expected a new name, got in.pt, which exists"),
        (["export", "saved", "out.pt", "--force", "--optimizer"], 0, ""),
        (
            ["import", "bad.pt", "out"],
            1,
            "bad.pt: expected a file of torch.save, got",
        ),
    ],
)
def test_exit_statuses(tmp_path, saved, monkeypatch, capsys, arguments, status, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest has its own
    monkeypatch.setattr(__main__, "SECONDS", float("inf"))
    torch.save({"w": torch.ones(1)}, "in.pt")
    pathlib.Path("bad.pt").touch()
    assert main(arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err and (status == 0) == (captured.err == "")
    assert (tmp_path / arguments[2]).exists() == (status == 0 or arguments[2] == "in.pt")


def test_progress_is_shown(tmp_path, saved, monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(__main__, "SECONDS", 0.0)
    assert main(["export", str(saved), str(tmp_path / "out.pt")]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == sum(tensor.numel() > 0 for tensor in tensors().values())
    assert all(re.fullmatch(r"zerocore export: 0.00 of 0.00 GB, \d+ MB/s", line) for line in lines)
