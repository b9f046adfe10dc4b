"""The example, of which rank 1 is killed before step KILL_AT, the first time that it runs."""

import os
import pathlib
import random
import signal
import sys

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import train_gpt

import zerocore

steps = 0


def step(optimizer, *arguments, step=zerocore.AdamW.step):
    global steps
    steps += 1
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1"
    random.random(), np.random.rand(), torch.rand(1)  # so that their states tell steps
    if first and steps == int(os.environ["KILL_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return step(optimizer, *arguments)


zerocore.AdamW.step = step
random.seed(int(os.environ["RANK"]))
np.random.seed(int(os.environ["RANK"]))
train_gpt.main()
