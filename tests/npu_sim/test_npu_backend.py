"""What zerocore.backend() finds where torch_npu is installed."""

import json
import os
import subprocess
import sys

import npu_build
import pytest
import torch
import torch.distributed as dist

import zerocore
from zerocore.backend import choose


def found():
    index = dist.get_rank()
    chosen = zerocore.backend()
    assert chosen == (
        torch.device("npu", index),
        "hccl",
        "the default process group has hccl for npu",
    )
    assert choose([torch.device("cpu"), torch.device("meta")], None) == chosen
    assert choose([torch.ones(1).npu().device], None)[:2] == chosen[:2]
    assert choose([], "npu")[:2] == chosen[:2]
    assert choose([], "cpu")[:2] == (torch.device("cpu"), "gloo")
    with pytest.raises(ValueError, match=rf"expected npu:{index}, .*call torch\.npu\.set_device"):
        choose([torch.device("npu", 1 - index)], None)


def test_ranks_of_hccl_train_on_their_npu(npus):
    npus(2, found)


SCRIPT = """if True:
    import json, sys, torch, torch.distributed as dist
    import zerocore
    def report():
        device, name, reason = zerocore.backend()
        return [str(device), name, reason]
    answers = [report()]
    for backend in ("gloo", None):
        store = f"file://{sys.argv[1]}/{backend}"
        dist.init_process_group(backend, store, world_size=1, rank=0)
        answers.append(report())
        dist.destroy_process_group()
    print(json.dumps([answers, "torch_npu" in sys.modules]))
"""


def answers(folder, env):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.skipif(torch.version.cuda is not None, reason="the fake NPU needs a CPU torch")
def test_the_default_group_decides(tmp_path):
    env = npu_build.environment("late")
    (alone, gloo, default), loaded = answers(tmp_path, env)
    assert loaded
    assert alone == ["npu:0", "hccl", "torch finds an accelerator of type npu on this machine"]
    assert gloo[:2] == ["cpu", "gloo"]
    assert "has nothing for npu, where init_process_group('hccl') would" in gloo[2]
    assert default == ["npu:0", "hccl", "the default process group has hccl for npu"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="the fake NPU needs a CPU torch")
def test_without_a_device_or_without_torch_npu_it_is_the_cpu(tmp_path):
    env = npu_build.environment("late")
    for change, loaded in ({"NPU_SIM_DEVICES": "0"}, True), ({"PYTHONPATH": ""}, False):
        path = os.pathsep.join([change.get("PYTHONPATH", env["PYTHONPATH"]), *sys.path])
        folder = tmp_path / str(loaded)
        folder.mkdir()
        found, is_loaded = answers(folder, {**env, **change, "PYTHONPATH": path})
        assert {tuple(answer[:2]) for answer in found} == {("cpu", "gloo")}
        assert is_loaded == loaded
