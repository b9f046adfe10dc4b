"""What `python -m zerocore env` finds on simulated GPUs."""

import torch

from zerocore import env


def find():
    build, machine = env.find_build(), env.find_machine()
    return build, machine, env.find_choice(), env.problems(build, machine)


def test_gpus_are_found_and_chosen(gpus):
    for rank, (build, machine, choice, problems) in enumerate(gpus(2, find)):
        assert build.torch == machine.torch == torch.__version__
        assert build.cuda is not None
        assert machine.accelerator == "cuda"
        assert len(machine.devices) == len(machine.capabilities) == 4
        assert set(machine.backends) >= {"gloo", "nccl"}
        assert choice.startswith(f"cuda:{rank} over nccl: ")
        assert problems == []
        report = env.report(build, machine, choice, problems)
        assert "accelerator  4 x cuda (" in report
        assert f"nccl {machine.backends['nccl']}" in report
