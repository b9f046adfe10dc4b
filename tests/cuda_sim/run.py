"""Runs a command on simulated GPUs: python run.py -- torchrun --nproc-per-node 2 script.py

In scripts that use torch's own operators on them, call `cuda_sim.enable_cpu_ops()` after `import
torch`; the folder of cuda_sim.py is on PYTHONPATH.
"""

import argparse
import os
from pathlib import Path

import cuda_sim
import cuda_sim_build

HERE = Path(__file__).resolve().parent


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedule", choices=["lazy", "eager"], default="lazy")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    twins = cuda_sim_build.build_all()
    simulated = cuda_sim.environment(cuda_sim_build.OUT, twins, options.schedule, options.devices)
    env = {**os.environ, **simulated}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), env.get("PYTHONPATH")]))
    os.execvpe(options.command[0], options.command, env)


if __name__ == "__main__":
    main()
