"""The example is killed, restarted by torchrun, and ends with the bits of a run without that."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import torch

from zerocore.checkpoint.format import METADATA, Catalog
from zerocore.convert.dcp_reader import Checkpoint

TESTS = pathlib.Path(__file__).resolve().parent
OPTIONS = (
    "--layers 2 --dim 32 --heads 2 --seq 32 --batch 4 --grad-accum 2 --steps 10 --warmup 3 "
    "--eval-every 7 --eval-bytes 1024 --sample 0 --log-every 1 --stage 3 --precision fp16"
).split()


def train(folder, kill_at, *options, ranks=2):
    """What a run prints."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1"]
    torchrun += ["--nproc-per-node", str(ranks), "--max-restarts", "1"]
    script = [str(TESTS / "interrupted_training.py"), *OPTIONS, "--checkpoint-dir", str(folder)]
    paths = [str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"KILL_AT": str(kill_at), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *torchrun, *script, *options],
        env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def contents(path):
    """Everything in a checkpoint by key."""
    catalog = Catalog(path, (path / METADATA).read_bytes())
    tensors = Checkpoint(path)
    result = {}
    for key in catalog.keys():
        if tensors.is_tensor(key):
            entry = tensors.entry(key, key)
            result[key] = torch.cat([torch.empty(0, dtype=entry.dtype), *entry.stream()])
        else:
            result[key] = catalog.read(key)
    return result


def assert_equal(got, expected, where=""):
    """The same values, types and bits."""
    assert type(got) is type(expected), where
    if isinstance(expected, dict):
        assert list(got) == list(expected), where
        for key in expected:
            assert_equal(got[key], expected[key], f"{where} {key}")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), where
        for one, other in zip(got, expected, strict=True):
            assert_equal(one, other, where)
    elif isinstance(expected, torch.Tensor | np.ndarray):
        assert got.dtype == expected.dtype and got.shape == expected.shape, where
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes(), where
    else:
        assert got == expected, where


def lines(output):
    """Steps, losses and validations of what a run prints, without times."""
    found = re.findall(
        r"^(step +\d+/10  (?:loss \S+|validation \S+)|validation after.*)", output, re.M
    )
    return dict.fromkeys(found)


def test_a_killed_and_restarted_run_ends_with_the_bits_of_one_that_was_not(tmp_path):
    straight = train(tmp_path / "straight", 0)
    assert "goes on" not in straight
    killed = train(tmp_path / "killed", 9, "--save-every", "3")
    assert "goes on after step 6, from " in killed
    assert lines(killed) == lines(straight) and len(lines(straight)) == 10 + 2 + 1
    names = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert names == ["step-00000009", "step-00000010"]  # --keep 2
    got, expected = (contents(tmp_path / run / names[-1]) for run in ("killed", "straight"))
    for part in ("model.", "optim.state.", "optim.param_groups.", "extra"):
        assert any(key.startswith(part) for key in expected)
    assert_equal(got, expected)
    # What is done is not done again, on any number of ranks.
    again = train(tmp_path / "killed", 0, ranks=1)
    assert "goes on after step 10" in again
    assert lines(again) == {line: None for line in lines(straight) if "after" in line}
