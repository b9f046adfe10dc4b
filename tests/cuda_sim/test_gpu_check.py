"""benchmarks/gpu_check.py runs from end to end, and its checks find what is wrong."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from zerocore import ops

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE.parents[1] / "benchmarks"
SCRIPT = BENCHMARKS / "gpu_check.py"
sys.path.insert(0, str(BENCHMARKS))
sys.path.insert(0, str(HERE.parents[1] / "examples"))
import gpu_training  # noqa: E402
import gpu_verify  # noqa: E402

ON_THE_SIMULATOR = f"""
import runpy, sys, torch, cuda_sim
cuda_sim.enable_cpu_ops()
sys.path[0] = {str(BENCHMARKS)!r}
sys.argv[0] = {str(SCRIPT)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_script(command, env):
    path = os.pathsep.join([str(HERE), *sys.path])
    env = {**os.environ, **env, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=300
    )


def test_report(pool_options, tmp_path):
    options = "--no-build --budget 200 --parts timing step --sizes 1e3 --repeats 1".split()
    options += "--layers 1 --dim 64 --seq 16 --batch 2 --results".split()
    done = run_script(["-c", ON_THE_SIMULATOR, *options, str(tmp_path)], pool_options["env"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no check failed, 0 not done" in done.stdout
    (report,) = tmp_path.glob("*-gpu-cuda-sim-device-0.txt")
    text = report.read_text()
    for peer in (
        "AdamW(fused), cast",
        "torch.cat(out=)",
        "mul_",
        "vector_norm in fp32",
        "of one buffer",
    ):
        assert f"{peer}: " in text and peer in done.stdout
    for name in gpu_training.VARIANTS:
        assert f"ok {name}: set up" in text and f"{name:30}" in done.stdout


def test_no_gpu():
    done = run_script([str(SCRIPT)], {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1
    assert "expected a CUDA GPU, got none" in done.stderr


class Wrong:
    """Operators whose results on a GPU are wrong in one element, or by very little."""

    @staticmethod
    def spoil(tensor):
        if tensor.is_cuda and tensor.numel():
            last = tensor.view(-1)[-9:-8] if tensor.numel() > 20 else tensor.view(-1)[:1]
            last.copy_(torch.where(last == 0, torch.ones_like(last), last + last))

    @staticmethod
    def pack_(out, *args, right=ops.pack_):
        right(out, *args)
        Wrong.spoil(out)

    @staticmethod
    def sum_shards_(out, *args, right=ops.sum_shards_, **options):
        right(out, *args, **options)
        Wrong.spoil(out)

    @staticmethod
    def sumsq(x, right=ops.sumsq):
        return right(x) * (1 + 1e-9 * x.is_cuda)

    @staticmethod
    def fused_adamw_(param, *args, right=ops.fused_adamw_, **options):
        right(param, *args, **options)
        Wrong.spoil(args[2])  # exp_avg_sq


def some_checks():
    """A check of each kind and operator."""
    gpu_verify.BEYOND = 5005
    checks = dict(gpu_verify.checks(3001))
    names = [name for name in checks if "CUDA graphs" not in name and "skips" not in name]
    kept = [name for name in names if not name.startswith(("pack_", "sum", "fused_adamw_ of f"))]
    kept += ["sumsq of bfloat16", "sum_shards_ float16 to float64", "pack_ float32 to bfloat16, "]
    kept[-1] += "scale 0.33"
    return {name: checks[name] for name in kept}


def verify_right_and_wrong():
    """Names of checks, and of those that fail when the operators are wrong."""
    checks, failed = some_checks(), []
    for run in checks.values():
        run()
    names = ("pack_", "sum_shards_", "sumsq", "fused_adamw_")
    with mock.patch.multiple(ops, **{name: getattr(Wrong, name) for name in names}):
        for name, run in checks.items():
            try:
                run()
            except AssertionError:
                failed.append(name)
    return list(checks), failed


def test_checks_find_wrong_results(gpus):
    ((made, failed),) = gpus(1, verify_right_and_wrong)
    assert len(made) >= 8
    # On several streams wrong results agree with wrong ones: what it is about is their order.
    assert [name for name in made if name not in failed] == ["several streams at once"]


def right_and_wrong_stages():
    found = gpu_training.check_stages(torch.float32, 2), gpu_training.check_against_torch(2)
    with mock.patch.object(gpu_training.zerocore, "shard", slightly_other_shard):
        with pytest.raises(AssertionError, match="stage 2: losses"):
            gpu_training.check_stages(torch.float32, 2)
    return found


def slightly_other_shard(model, stage, *args, right=gpu_training.zerocore.shard, **options):
    if stage == 2:
        with torch.no_grad():
            model.head.weight[0, 0] += 2**-8
    return right(model, stage, *args, **options)


def test_stages_are_compared(gpus):
    ((learnt, same),) = gpus(1, right_and_wrong_stages)
    assert learnt.endswith("in 2 steps") and same == "the same bits"


def test_profile():
    events = [
        {"name": "void zerocore::kernels::cuda::adamw_kernel<float>()", "ts": 100.0, "dur": 50.0},
        {"name": "gemm", "ts": 120.0, "dur": 80.0},  # beside the first
        {"name": "ncclDevKernel_AllGather", "ts": 300.0, "dur": 20.0},
        {"name": "Memcpy DtoD (Device -> Device)", "ts": 350.0, "dur": 50.0},
    ]
    lines = gpu_training.profile_lines(events, 2)
    assert "0.15 ms a step on the device, of which 43.3% nothing ran" in lines[0]
    assert "zerocore's kernels 25.0%, NCCL 10.0%, copies and fills 25.0%" in lines[1]
    assert [line.split()[0] for line in lines[3:]] == ["0.040", "0.025", "0.025", "0.010"]
    assert lines[3].endswith("gemm")
    assert "no work on the device" in gpu_training.profile_lines([], 2)[0]
