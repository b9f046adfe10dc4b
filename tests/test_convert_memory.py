"""Conversions take the memory of a tensor, whatever the size of the checkpoint."""

import json
import pathlib
import subprocess
import sys

import torch
import torch.distributed.checkpoint as dcp

ROOT = pathlib.Path(__file__).resolve().parents[1]
TENSOR = 16 << 20  # bytes
COUNT = 19  # 304 MiB

# Converts a small checkpoint, so that all code is loaded, then the large one, and prints the most
# bytes that the process had meanwhile beyond those before. Writing 5 resets the peak.
MEASURE = """
import json, pathlib, re, sys
from zerocore.__main__ import main

def memory(field):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(field + r":\\s+(\\d+) kB", status)[1]) << 10

peaks = []
for command, source, target, *options in json.loads(sys.argv[1]):
    assert main([command, "small" + source, "small" + target, *options]) == 0
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    assert main([command, "large" + source, "large" + target, *options]) == 0
    peaks.append(memory("VmHWM") - before)
print(json.dumps(peaks))
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    for name, count in (("large", COUNT), ("small", 1)):
        state = {str(i): torch.full((TENSOR >> 12, 1 << 10), i + 0.5) for i in range(count)}
        dcp.save({"model": state}, checkpoint_id=tmp_path / name)
    commands = [
        ("export", "", ".safetensors"),
        ("export", "", ".pt"),
        ("export", "", ".bf16.safetensors", "--dtype", "bf16"),
        ("import", ".safetensors", ".1"),
        ("import", ".pt", ".2"),
    ]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURE, json.dumps(commands)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    slack = 16 << 20  # what the allocator keeps
    for command, peak in zip(commands, json.loads(result.stdout), strict=True):
        assert peak < 2 * TENSOR + slack, command
