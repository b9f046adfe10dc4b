"""Checkpoints in other formats, and weights of other formats as checkpoints."""

import functools
import json
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from saved_states import (
    assert_same,
    load_fsdp2,
    load_sharded,
    optimizer,
    plain_model,
    save_dtensors,
    save_fsdp2,
    save_sharded,
    tensors,
    zeros_like,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from zerocore.convert import entry, export_checkpoint, import_checkpoint, safetensors


def read_safetensors(path):
    """By the safetensors library."""
    return pytest.importorskip("safetensors.torch").load_file(path)


def read_torch(path):
    return torch.load(path, weights_only=True)


def load(path, like):
    """What torch's own loader reads."""
    target = zeros_like(like)
    dcp.load(target, checkpoint_id=path)
    return target


LAYOUTS = {
    "model and optim": lambda: {"model": tensors(), "optim": optimizer()},
    "bare": tensors,
    "in a dict": lambda: {"app": {"model": tensors(), "optim": optimizer()}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_export_gives_the_model_under_its_names(tmp_path, layout, suffix):
    dcp.save(LAYOUTS[layout](), checkpoint_id=tmp_path / "saved")
    out = tmp_path / f"out.{suffix}"
    export_checkpoint(tmp_path / "saved", out)
    read = read_safetensors if suffix == "safetensors" else read_torch
    assert_same(read(out), tensors())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["saved", out.name])


@pytest.mark.parametrize("kept", [True, False], ids=["with model alone", "with another tensor"])
def test_without_a_record_of_nesting_the_prefix_tells(tmp_path, kept):
    state = {f"model.{name}": value for name, value in tensors().items()}
    state["optim.x"] = torch.ones(2)
    if not kept:
        state["head"] = torch.ones(3)  # so "model." is a module of this name
    dcp.save(state, checkpoint_id=tmp_path / "saved")
    export_checkpoint(tmp_path / "saved", tmp_path / "out.pt")
    assert_same(read_torch(tmp_path / "out.pt"), tensors() if kept else state)


def test_export_of_an_optimizer(tmp_path):
    saved = {"model": tensors(), "optim": optimizer()}
    dcp.save(saved, checkpoint_id=tmp_path / "saved")
    export_checkpoint(tmp_path / "saved", tmp_path / "out.pt", optimizer=True)
    assert_same(read_torch(tmp_path / "out.pt"), saved)
    import_checkpoint(tmp_path / "out.pt", tmp_path / "again")
    assert_same(load(tmp_path / "again", saved), saved)


def test_export_of_what_fsdp2_saved(tmp_path, ranks):
    full, averages = ranks(2, save_fsdp2, str(tmp_path / "saved"))[0]
    export_checkpoint(tmp_path / "saved", tmp_path / "out.pt", optimizer=True)
    export_checkpoint(tmp_path / "saved", tmp_path / "out.safetensors")
    state = read_torch(tmp_path / "out.pt")
    assert_same(state["model"], full)
    assert_same({k: v["exp_avg"] for k, v in state["optim"]["state"].items()}, averages)
    assert_same({e.name: whole(e) for e in safetensors.read(tmp_path / "out.safetensors")}, full)
    # A plain model and its optimizer go on from there.
    model = plain_model()
    model.load_state_dict(state["model"])
    adam = torch.optim.AdamW(model.parameters(), lr=1.0)
    set_optimizer_state_dict(model, adam, state["optim"])
    again = get_optimizer_state_dict(model, adam)
    assert_same({k: v["exp_avg"] for k, v in again["state"].items()}, averages)
    assert adam.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("stage", [0, 3])
def test_export_of_what_zerocore_saved_and_back(tmp_path, ranks, stage):
    full, moments = ranks(2, save_sharded, tmp_path / "saved", stage)[0]
    export_checkpoint(tmp_path / "saved", tmp_path / "out.safetensors")
    assert_same({e.name: whole(e) for e in safetensors.read(tmp_path / "out.safetensors")}, full)
    export_checkpoint(tmp_path / "saved", tmp_path / "out.pt", optimizer=True)
    state = read_torch(tmp_path / "out.pt")
    assert_same(state["model"], full)
    assert_same(state["optim"]["state"], moments["state"])
    import_checkpoint(tmp_path / "out.safetensors", tmp_path / "again")
    for got, extra in ranks(2, load_sharded, tmp_path / "again", 3 - stage):
        assert_same(got, full)
        assert extra == {}


def whole(item, step=3):
    parts = list(item.parts(step))
    assert all(part.numel() == step for part in parts[:-1])
    return torch.cat(parts).view(item.shape)


def test_export_of_tensors_cut_along_any_dimension(tmp_path, ranks):
    expected = ranks(2, save_dtensors, str(tmp_path / "saved"))[0]
    export_checkpoint(tmp_path / "saved", tmp_path / "out.pt")
    assert_same(read_torch(tmp_path / "out.pt"), expected)


@pytest.mark.parametrize("part_bytes", [1, 16, 1 << 20])
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_parts_of_any_size(tmp_path, monkeypatch, suffix, part_bytes):
    monkeypatch.setattr(entry, "PART_BYTES", part_bytes)
    monkeypatch.setattr("zerocore.convert.dcp_writer.CHUNK_BYTES", part_bytes)
    monkeypatch.setattr("zerocore.checkpoint.files.FILE_BYTES", 50 * part_bytes)
    torch.save(tensors(), tmp_path / "in.pt")
    import_checkpoint(tmp_path / "in.pt", tmp_path / "saved")
    assert_same(load(tmp_path / "saved", {"model": tensors()}), {"model": tensors()})
    out = tmp_path / f"out.{suffix}"
    export_checkpoint(tmp_path / "saved", out)
    import_checkpoint(out, tmp_path / "again")
    assert_same(load(tmp_path / "again", {"model": tensors()}), {"model": tensors()})


def test_torch_files_are_whole_zip_files_that_can_be_mapped(tmp_path):
    dcp.save(tensors(), checkpoint_id=tmp_path / "saved")
    out = tmp_path / "out.pt"
    export_checkpoint(tmp_path / "saved", out)
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
    assert_same(torch.load(out, weights_only=True, mmap=True), tensors())
    for name, tensor in torch.load(out, map_location="meta", weights_only=True).items():
        assert tensor.untyped_storage()._checkpoint_offset % 64 == 0, name


def test_safetensors_files_are_aligned_and_name_their_format(tmp_path):
    dcp.save(tensors(), checkpoint_id=tmp_path / "saved")
    out = tmp_path / "out.safetensors"
    export_checkpoint(tmp_path / "saved", out)
    content = out.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert length % 8 == 0
    for name, field in header.items():
        assert field["data_offsets"][0] % tensors()[name].dtype.itemsize == 0


@pytest.mark.parametrize("shard_bytes", [1, 100, 10**9])
def test_folders_of_several_files(tmp_path, shard_bytes):
    dcp.save(tensors(), checkpoint_id=tmp_path / "saved")
    out = tmp_path / "out"
    export_checkpoint(tmp_path / "saved", out, shard_bytes=shard_bytes)
    files = sorted(out.glob("*.safetensors"))
    assert sorted(p.name for p in out.iterdir()) == sorted(
        [p.name for p in files] + (["model.safetensors.index.json"] if len(files) > 1 else [])
    )
    for i, file in enumerate(files, start=1):
        entries = safetensors.read(file)
        assert len(entries) == 1 or sum(e.nbytes for e in entries) <= shard_bytes
        if len(files) > 1:
            assert file.name == f"model-{i:05d}-of-{len(files):05d}.safetensors"
    if len(files) > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors().values())
        for name, file in index["weight_map"].items():
            assert name in {e.name for e in safetensors.read(out / file)}
    import_checkpoint(out, tmp_path / "again")
    assert_same(load(tmp_path / "again", {"model": tensors()}), {"model": tensors()})


def test_a_forced_export_leaves_nothing_of_the_one_before(tmp_path):
    dcp.save(tensors(), checkpoint_id=tmp_path / "saved")
    out = tmp_path / "out"
    export_checkpoint(tmp_path / "saved", out, shard_bytes=100)
    (out / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="expected a new name, got .*index.json"):
        export_checkpoint(tmp_path / "saved", out, shard_bytes=10**9)
    export_checkpoint(tmp_path / "saved", out, shard_bytes=10**9, force=True)
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]


def test_dtype_is_of_the_models_floating_point_tensors(tmp_path):
    saved = {"model": tensors(), "optim": optimizer()}
    del saved["model"]["complex"]
    dcp.save(saved, checkpoint_id=tmp_path / "saved")
    export_checkpoint(tmp_path / "saved", tmp_path / "out.pt", dtype=torch.bfloat16, optimizer=True)
    state = read_torch(tmp_path / "out.pt")
    expected = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in saved["model"].items()
    }
    assert_same(state, {"model": expected, "optim": saved["optim"]})
    import_checkpoint(tmp_path / "out.pt", tmp_path / "again", dtype=torch.float32)
    wide = {n: t.float() if t.is_floating_point() else t for n, t in expected.items()}
    again = {"model": wide, "optim": saved["optim"]}
    assert_same(load(tmp_path / "again", again), again)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 65504.0, 65536.0, -1e9])
def test_no_value_becomes_infinite(tmp_path, value):
    dcp.save({"w": torch.tensor([1.0, value])}, checkpoint_id=tmp_path / "saved")
    out = tmp_path / "out.pt"
    if value in (65536.0, -1e9):
        with pytest.raises(ValueError, match=r"dtype: expected values of at most 65504 .* in w"):
            export_checkpoint(tmp_path / "saved", out, dtype=torch.float16)
        assert not out.exists()
        return
    export_checkpoint(tmp_path / "saved", out, dtype=torch.float16)
    assert_same(read_torch(out), {"w": torch.tensor([1.0, value]).half()})


def test_values_that_are_no_tensors(tmp_path):
    state = {"w": torch.ones(2), "_extra_state": {"scale": 2.0}, "version": 3}
    torch.save(state, tmp_path / "in.pt")
    import_checkpoint(tmp_path / "in.pt", tmp_path / "saved")
    expected = {"model": {"w": torch.ones(2), "_extra_state": {"scale": 2.0}, "version": 3}}
    assert_same(load(tmp_path / "saved", expected), expected)
    notes = []
    export_checkpoint(tmp_path / "saved", tmp_path / "out.safetensors", note=notes.append)
    assert notes == ["left out, since they are no tensors: _extra_state.scale, version"]
    export_checkpoint(tmp_path / "saved", tmp_path / "out.pt")
    assert_same(read_torch(tmp_path / "out.pt"), state)


def test_a_file_of_the_old_format_of_torch_is_imported(tmp_path):
    state = tensors()
    del state["uint16"], state["float8"]  # torch.load reads none in this format
    torch.save(state, tmp_path / "in.bin", _use_new_zipfile_serialization=False)
    notes = []
    import_checkpoint(tmp_path / "in.bin", tmp_path / "saved", note=notes.append)
    assert_same(load(tmp_path / "saved", {"model": state}), {"model": state})
    assert len(notes) == 1 and "as a whole" in notes[0]


@pytest.mark.parametrize("wrapper", ["state_dict", "model_state_dict", "model"])
def test_a_model_among_other_things_is_found(tmp_path, wrapper):
    torch.save({wrapper: {"w": torch.ones(3)}, "epoch": 3}, tmp_path / "in.ckpt")
    notes = []
    import_checkpoint(tmp_path / "in.ckpt", tmp_path / "saved", note=notes.append)
    expected = {"model": {"w": torch.ones(3)}}
    assert_same(load(tmp_path / "saved", expected), expected)
    assert notes == [f"left out of {tmp_path / 'in.ckpt'}: epoch"]


def test_names_are_changed(tmp_path):
    torch.save({"module.a": torch.ones(1), "b": torch.zeros(1)}, tmp_path / "in.pt")
    import_checkpoint(tmp_path / "in.pt", tmp_path / "saved", strip_prefix="module.", prefix="net.")
    expected = {"model": {"net.a": torch.ones(1), "net.b": torch.zeros(1)}}
    assert_same(load(tmp_path / "saved", expected), expected)
    with pytest.raises(
        ValueError, match="strip_prefix: expected names that begin with 'x.', got 'm"
    ):
        import_checkpoint(tmp_path / "in.pt", tmp_path / "other", strip_prefix="x.")
    torch.save({"m.a": torch.ones(1), "a": torch.zeros(1)}, tmp_path / "twice.pt")
    with pytest.raises(ValueError, match="expected different names, got 'a' twice"):
        import_checkpoint(tmp_path / "twice.pt", tmp_path / "other", strip_prefix="m.")


def test_what_was_imported_loads_into_an_fsdp2_model_and_converts_by_torch(tmp_path, ranks):
    state = plain_model().state_dict()
    torch.save(state, tmp_path / "in.pt")
    import_checkpoint(tmp_path / "in.pt", tmp_path / "saved")
    for full in ranks(2, load_fsdp2, str(tmp_path / "saved")):
        assert_same(full, dict(state))
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "out.pt")
    assert_same(read_torch(tmp_path / "out.pt"), {"model": dict(state)})


def test_hugging_face_reads_and_writes_the_same_folders(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        vocab_size=50,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)  # its input and output embeddings are tied
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "saved")
    for shard_bytes in (10_000, 10**9):
        out = tmp_path / f"out{shard_bytes}"
        config.save_pretrained(out)
        export_checkpoint(tmp_path / "saved", out, shard_bytes=shard_bytes)
        loaded, info = transformers.GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
        assert not any(info.values()), info
        assert_same(dict(loaded.state_dict()), state)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    assert len(list((tmp_path / "theirs").glob("model-*"))) > 1
    import_checkpoint(tmp_path / "theirs", tmp_path / "again")
    # They leave tied parameters out, but for one of the names.
    kept = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    assert_same(load(tmp_path / "again", {"model": kept}), {"model": kept})


def test_torchs_folders_of_several_files(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    halves = {"pytorch_model-00001-of-00002.bin": ["a"], "pytorch_model-00002-of-00002.bin": ["b"]}
    for i, (file, names) in enumerate(halves.items()):
        torch.save({name: torch.full((3,), float(i)) for name in names}, folder / file)
    weight_map = {name: file for file, names in halves.items() for name in names}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    import_checkpoint(folder, tmp_path / "saved")
    expected = {"model": {"a": torch.zeros(3), "b": torch.ones(3)}}
    assert_same(load(tmp_path / "saved", expected), expected)


def test_progress_counts_every_byte_once(tmp_path):
    total = sum(tensor.nbytes for tensor in tensors().values())
    torch.save(tensors(), tmp_path / "in.pt")
    for convert, source, target in (
        (import_checkpoint, "in.pt", "saved"),
        (export_checkpoint, "saved", "out.pt"),
        (export_checkpoint, "saved", "out.safetensors"),
    ):
        seen = []
        tell = functools.partial(lambda seen, *state: seen.append(state), seen)
        convert(tmp_path / source, tmp_path / target, progress=tell)
        assert seen[-1] == (total, total)
        assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_archives_without_checksums(tmp_path):
    with torch.utils.serialization.config.patch({"save.compute_crc32": False}):
        torch.save(tensors(), tmp_path / "in.pt")
    with zipfile.ZipFile(tmp_path / "in.pt") as archive:
        assert not any(record.CRC for record in archive.infolist())
    import_checkpoint(tmp_path / "in.pt", tmp_path / "saved")
    assert_same(load(tmp_path / "saved", {"model": tensors()}), {"model": tensors()})
