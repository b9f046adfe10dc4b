"""`python -m zerocore env`: what it finds here, and what it says where something is missing."""

import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch

from zerocore import _C, env

ROOT = pathlib.Path(__file__).resolve().parents[1]

BUILD = env.Build("1.0", "2.14.1+cu130", "13.0", ("8.0", "9.0", "10.0+PTX"), "avx2", ("avx2",))
GPU = env.Machine(
    torch="2.14.1+cu130",
    torch_cuda="13.0",
    torch_npu=None,
    accelerator="cuda",
    devices=("Some GPU", "Some GPU"),
    capabilities=((9, 0), (9, 0)),
    nvidia_driver="580.65.06",
    ascend_driver=None,
    backends={"gloo": "", "nccl": "2.30.7"},
)
CPU = dataclasses.replace(
    GPU,
    torch="2.14.1+cpu",
    torch_cuda=None,
    accelerator=None,
    devices=(),
    capabilities=(),
    nvidia_driver=None,
    backends={"gloo": ""},
)
CPU_BUILD = dataclasses.replace(BUILD, torch="2.14.1+cpu", cuda=None, archs=())
NPU = dataclasses.replace(
    CPU,
    torch_npu="2.14.0",
    accelerator="npu",
    devices=("Ascend910B",),
    ascend_driver="25.5.1",
    backends={"gloo": "", "hccl": ""},
)


def run_env(folder):
    command = [sys.executable, "-m", "zerocore", "env"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def package_without_extension(folder):
    shutil.copytree(
        pathlib.Path(env.__file__).parent,
        folder / "zerocore",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    return folder


def test_says_what_was_built_found_and_chosen():
    result = run_env(pathlib.Path(env.__file__).parents[1])
    assert result.returncode == 0, result.stderr
    sections = re.findall(r"^\w+$", result.stdout, re.MULTILINE)
    assert sections == ["built", "found", "chosen", "missing"]
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"zerocore     {version[1]}, against torch {torch.__version__}\n" in result.stdout
    assert f"CPU kernels  {_C.isa()} " in result.stdout
    assert re.search(r"backends +gloo", result.stdout)
    chosen = "cuda" if torch.cuda.is_available() else "cpu"
    assert re.search(rf"a CPU model +trains on {chosen}", result.stdout)


def test_build_knows_whether_it_has_cuda():
    build = env.find_build()
    assert (build.cuda is None) == (build.archs == ()) == (_C.BUILD["cuda_archs"] == "")
    if torch.version.cuda is None:
        assert build.cuda is None


@pytest.mark.parametrize("broken", [False, True], ids=["absent", "unreadable"])
def test_without_the_extension_env_says_so(tmp_path, broken):
    folder = package_without_extension(tmp_path)
    if broken:
        (folder / "zerocore" / pathlib.Path(_C.__file__).name).write_bytes(b"not a library")
    else:
        # An editable installation would find the one of the repository.
        absent = "raise ModuleNotFoundError(\"No module named 'zerocore._C'\")\n"
        (folder / "zerocore" / "_C.py").write_text(absent)
    result = run_env(folder)
    assert result.returncode == 1, result.stderr
    assert re.search(r"zerocore +not loadable: .*_C", result.stdout)
    assert "the compiled extension zerocore._C: " in result.stdout
    assert f"torch        {torch.__version__}" in result.stdout
    for arguments in (["-c", "import zerocore"], ["-m", "zerocore.ops"]):
        failed = subprocess.run(
            [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120
        )
        assert failed.returncode != 0
        assert "expected its compiled extension zerocore._C" in failed.stderr


@pytest.mark.parametrize(
    ("build", "machine"),
    [(BUILD, GPU), (CPU_BUILD, CPU), (CPU_BUILD, NPU)],
    ids=["cuda", "cpu", "npu"],
)
def test_nothing_is_missing(build, machine):
    assert env.problems(build, machine) == []


def changed(machine, **fields):
    return dataclasses.replace(machine, **fields)


@pytest.mark.parametrize(
    ("build", "machine", "expected"),
    [
        ("no module", CPU, "the compiled extension zerocore._C: no module"),
        (CPU_BUILD, changed(CPU, torch="2.15.0"), "compiled against torch 2.14.1+cpu"),
        (CPU_BUILD, changed(CPU, nvidia_driver="580.1"), "is a build without CUDA"),
        (changed(BUILD, cuda=None), GPU, "CUDA kernels in zerocore"),
        (BUILD, changed(GPU, capabilities=((7, 5),)), "kernels for compute capability 7.5"),
        (BUILD, changed(GPU, accelerator=None, capabilities=()), "driver is 580.65.06"),
        (
            BUILD,
            changed(GPU, accelerator=None, capabilities=(), nvidia_driver=None),
            "driver is not loaded",
        ),
        (BUILD, changed(GPU, backends={"gloo": ""}), "NCCL in torch"),
        (BUILD, changed(GPU, backends={"nccl": "2"}), "gloo in torch"),
        (CPU_BUILD, changed(CPU, ascend_driver="25"), "install the torch_npu"),
        (CPU_BUILD, changed(NPU, accelerator=None), "CANN"),
        (CPU_BUILD, changed(NPU, backends={"gloo": ""}), "HCCL in torch_npu"),
    ],
)
def test_each_missing_thing_is_named(build, machine, expected):
    found = env.problems(build, machine)
    assert len(found) == 1
    assert expected in found[0]
    assert found[0] in env.report(build, machine, "cpu", found)


@pytest.mark.parametrize(
    ("capability", "archs", "expected"),
    [
        ((8, 0), ("8.0",), True),
        ((8, 9), ("8.0",), True),  # newer of the same generation
        ((8, 0), ("8.6",), False),
        ((9, 0), ("8.0",), False),
        ((9, 0), ("8.0+PTX",), True),
        ((12, 0), ("8.0", "9.0", "10.0+PTX"), True),
        ((7, 5), ("8.0", "10.0+PTX"), False),
        ((9, 0), ("9.0a",), False),
    ],
)
def test_which_gpus_run_the_kernels(capability, archs, expected):
    assert env.runs_on(capability, archs) is expected


def test_report_of_a_gpu_machine():
    text = env.report(BUILD, GPU, "cuda:0 over nccl: because", [])
    assert "CUDA         13.0, kernels for 8.0 9.0 10.0+PTX\n" in text
    assert "accelerator  2 x cuda (Some GPU)\n" in text
    assert "driver       NVIDIA 580.65.06\n" in text
    assert "backends     gloo, nccl 2.30.7\n" in text
    assert "trains on cuda:0 over nccl: because\n" in text
    assert text.endswith("missing\n  - nothing")
