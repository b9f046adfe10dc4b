"""setup.py: the switches that stop a build which would not be what was asked for."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[1]


def setup(**variables):
    """setup.py up to the point where it would compile."""
    command = [sys.executable, "setup.py", "--version"]
    env = {**os.environ, **variables}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", ["ZEROCORE_CUDA", "ZEROCORE_WERROR", "DEBUG"])
def test_an_unknown_value_stops_the_build(name):
    result = setup(**{name: "yes"})
    assert result.returncode != 0
    assert f"{name}: expected one of " in result.stderr
    assert "got 'yes'" in result.stderr


def test_cuda_on_demand_says_what_is_missing(tmp_path):
    # With a CPU build of torch that is the torch; with a CUDA build, what is not in this toolkit.
    result = setup(ZEROCORE_CUDA="1", CUDA_HOME=str(tmp_path))
    assert result.returncode != 0
    assert "ZEROCORE_CUDA=1: expected a CUDA " in result.stderr
    missing = (
        "got no " + str(tmp_path / "bin" / "nvcc") if torch.version.cuda else torch.__version__
    )
    assert missing in result.stderr


def test_cuda_is_left_out_where_it_cannot_be_built(tmp_path):
    result = setup(ZEROCORE_CUDA="auto", CUDA_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "building without CUDA, which wants a CUDA " in result.stderr
    assert "without CUDA" not in setup(ZEROCORE_CUDA="0").stderr
