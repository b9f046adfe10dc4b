"""The installed extension holds CUDA kernels, though it was built on a machine without a GPU."""

import re
import subprocess
from pathlib import Path

import cuda_sim_build as build
import pytest
import torch


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")
def test_extension_has_code_for_all_architectures():
    from zerocore import _C

    (cuobjdump,) = build.WHEELS.glob("cu*/bin/cuobjdump")
    command = [cuobjdump, "--list-elf", "--list-ptx", _C.__file__]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = set(re.findall(r"sm_(\w+)\.(cubin|ptx)", listed))
    expected = set()
    for arch in _C.BUILD["cuda_archs"].split(";"):
        number = arch.removesuffix("+PTX").replace(".", "")
        expected.add((number, "cubin"))
        if arch.endswith("+PTX"):
            expected.add((number, "ptx"))
    assert found == expected


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")
def test_extension_is_not_the_source_tree():
    # The one beside the sources belongs to another environment and another torch.
    from zerocore import _C

    assert not Path(_C.__file__).is_relative_to(Path(__file__).resolve().parents[2] / "zerocore")
