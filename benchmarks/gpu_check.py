"""Builds, verifies and times zerocore on a machine with one NVIDIA GPU, and writes a report.

    python benchmarks/gpu_check.py

needs a CUDA build of torch, and for the build nvcc, g++, setuptools and ninja. Without nvcc: build
elsewhere for the same torch, put the package on PYTHONPATH, and add --no-build. Parts that would
take longer than --budget are left out, and the report says so; a check that fails makes the exit
code 1.
"""

import argparse
import datetime
import faulthandler
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_report import Report

ROOT = Path(__file__).resolve().parents[1]
BUILT = ROOT / "build" / "gpu_check"
RESULTS = ROOT / "benchmarks" / "results"
# Shares of the time that is left when a part begins.
CHECKS, STAGES, KERNELS = 0.35, 0.3, 0.6
PARTS = ("checks", "stages", "timing", "step")
MANY = 20_000_000  # elements, at most, of results that are compared with the CPU's
LEAST = 15  # seconds that must be left for training steps, and for their profile
GRACE = 45  # seconds after the budget: a hang ends there, with the stacks of all threads


def facts() -> list[str]:
    """The machine and the software."""
    device = torch.cuda.get_device_properties()
    memory = f"{device.total_memory / 2**30:.0f} GiB"
    if peak := 2e3 * device.memory_clock_rate * device.memory_bus_width / 8 / 1e9:
        memory += f" at {peak:.0f} GB/s"  # by its clock and bus
    commit = output_of(["git", "-C", str(ROOT), "describe", "--always", "--dirty"])
    query = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    nvidia = output_of(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", "0"])
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return [
        f"zerocore, commit {commit or 'unknown'}; {datetime.datetime.now():%Y-%m-%d %H:%M}",
        f"{device.name}, compute capability {device.major}.{device.minor}, "
        f"{device.multi_processor_count} multiprocessors, {memory}, "
        f"L2 cache {device.L2_cache_size / 2**20:.0f} MiB",
        f"driver, clock now, highest clock, memory clock, power limit: {nvidia or 'not readable'}",
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}; Python "
        f"{platform.python_version()}, {os.cpu_count()} CPU cores, {platform.platform()}",
    ]


def output_of(command: list[str]) -> str:
    """What a command prints; empty where it does not exist, fails or takes long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def build(report: Report) -> str:
    """Compiles zerocore for this GPU into a folder of its own, from where it is imported."""
    major, minor = torch.cuda.get_device_capability()
    env = {**os.environ, "ZEROCORE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}"}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    command = [sys.executable, "setup.py", "build", "--build-lib", str(BUILT)]
    seconds = 0.7 * report.left()
    begin = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=seconds
    )
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise RuntimeError(f"expected a build with CUDA, got\n{tail}")
    sys.path.insert(0, str(BUILT))
    return f"built for {major}.{minor} in {time.perf_counter() - begin:.0f} s"


def check_installation() -> str:
    """That the extension is there and fits torch and the GPU."""
    from zerocore import env

    built, machine = env.find_build(), env.find_machine()
    if missing := env.problems(built, machine):
        raise RuntimeError("expected " + "; ".join(missing))
    archs, path = " ".join(built.archs), Path(env.__file__).parent
    return f"CUDA {built.cuda}, kernels for {archs}, CPU kernels {built.isa}, in {path}"


def run_checks(
    report: Report, name: str, checks: list[tuple[str, Callable[[], object]]], share: float
) -> None:
    """Runs checks while there is time, and says how many failed."""
    until, failed, begin = report.left() * (1 - share), len(report.failed), time.perf_counter()
    dropped, late = len(report.dropped), []
    for text, run in checks:
        if report.left() < until:
            late.append(text)
        else:
            report.check(text, run)
    failed = len(report.failed) - failed
    dropped = len(report.dropped) - dropped + len(late)
    if late:
        report.drop(f"{name}, no time for {len(late)}: {'; '.join(late)}")
    report.say(
        f"{name}: {len(checks) - failed - dropped} checks passed, {failed} failed, {dropped} not "
        f"done ({time.perf_counter() - begin:.0f} s)"
    )


def verify(report: Report, sizes: list[int]) -> None:
    """All kernels against the CPU's and against float64."""
    import gpu_verify

    checks = gpu_verify.checks(min(max(sizes), MANY))
    run_checks(report, "kernels against CPU bits and float64", checks, CHECKS)


def compare_stages(report: Report) -> None:
    """Stages 0 to 3 against each other, and stage 0 against plain torch."""
    import gpu_training

    checks = [("stage 0 against plain torch", lambda: gpu_training.check_against_torch(8))]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = f"stages 0 to 3 in {str(dtype).removeprefix('torch.')}"
        checks.append((name, lambda dtype=dtype: gpu_training.check_stages(dtype, 10)))
    with gpu_training.one_rank():
        run_checks(report, "training at stages 0 to 3", checks, STAGES)


def time_kernels(report: Report, options: argparse.Namespace) -> list:
    """Times all kernels, small sizes first; returns the results."""
    import gpu_timing
    from gpu_verify import room_for

    until = report.left() * (1 - KERNELS)
    each = report.left() * KERNELS / (len(options.sizes) * len(gpu_timing.CASES)) / 3
    timer, results = gpu_timing.Timer(options.repeats), []

    def run(entry: gpu_timing.Entry, numel: int) -> None:
        torch.cuda.empty_cache()
        room_for(entry.memory * numel)
        result = gpu_timing.time_case(entry, numel, timer, each)
        report.note(gpu_timing.describe(result))
        results.append(result)

    for numel in sorted(options.sizes):
        for entry in gpu_timing.CASES:
            name = f"timing {entry.kernel}, {numel:,} elements"
            if report.left() < until:
                report.drop(f"{name}: no time")
            else:
                report.check(name, lambda entry=entry, numel=numel: run(entry, numel))
    return results


def time_training(report: Report, options: argparse.Namespace) -> None:
    """Steps of a GPT: zerocore's and others', and what the device does in one of zerocore's."""
    import gpu_training

    if report.left() < LEAST:
        report.drop("training step: no time")
        return
    torch.cuda.empty_cache()
    size = gpu_training.Size(options.layers, options.dim, options.seq, options.batch)
    report.say(f"\nGPT of {gpu_training.parameters(size):,} parameters in bf16, {size}")
    with gpu_training.one_rank():
        time_variants(report, size, options.repeats)  # its models must not outlive the group


def time_variants(report: Report, size: Any, repeats: int) -> None:
    """What `time_training` does on its process group."""
    import gpu_training

    batch = gpu_training.make_batch(size.batch, size.seq)
    deadline = time.perf_counter() + 0.5 * report.left()
    steps, losses = {}, {}
    for name, make in gpu_training.VARIANTS.items():
        if steps and time.perf_counter() > deadline:
            report.drop(f"{name}: no time")
            continue
        first = report.check(f"{name}: set up", lambda m=make: gpu_training.set_up(m, size, batch))
        if first is not None:
            steps[name], losses[name] = first
    ours = next(iter(gpu_training.VARIANTS))
    if ours not in steps:
        return
    report.check("losses of the first three steps", lambda: gpu_training.check_losses(losses))
    for line in gpu_training.time_steps(steps, batch, repeats, deadline):
        report.say(line)
    if report.left() < LEAST:
        report.drop("profile of a step: no time")
        return
    events = gpu_training.device_work(lambda: steps[ours](*batch), 3)
    lines = gpu_training.profile_lines(events, 3)
    report.say("\n".join(lines[:2]))
    report.note("\n".join(lines[2:]))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=420, help="seconds, the build included")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--no-build", action="store_true", help="take the zerocore that is there")
    sizes = [10**6, 10**7, 10**8, 5 * 10**8]
    number = lambda text: int(float(text))  # noqa: E731
    parser.add_argument("--sizes", type=number, nargs="+", default=sizes, help="1e6 1e7 ...")
    parser.add_argument("--repeats", type=int, default=40, help="at most, of what is timed")
    parser.add_argument("--layers", type=int, default=12, help="of the GPT whose step is timed")
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the report")
    return parser.parse_args()


def run(report: Report, options: argparse.Namespace) -> None:
    """All parts."""
    if not options.no_build:
        built = report.check("build", lambda: build(report))
        report.say(str(built or "the build failed"))
    report.say(f"zerocore: {report.check('installation', check_installation) or 'not usable'}")
    if report.failed:
        return
    import gpu_timing

    results = None
    if "checks" in options.parts:
        verify(report, options.sizes)
    if "stages" in options.parts:
        report.check("training at stages 0 to 3", lambda: compare_stages(report))
    if "timing" in options.parts:
        results = report.check("timing", lambda: time_kernels(report, options))
    if "step" in options.parts:
        report.check("training step", lambda: time_training(report, options))
    if results:
        report.say(f"\n{gpu_timing.table(results)}\n")


def main() -> None:
    options = parse_options()
    if not torch.cuda.is_available():
        raise SystemExit(
            f"expected a CUDA GPU, got none that torch {torch.__version__} can use (CUDA build: "
            f"{torch.version.cuda or 'no'}); see `nvidia-smi` and `python -m zerocore env`"
        )
    faulthandler.dump_traceback_later(options.budget + GRACE, exit=True)
    torch.cuda.set_device(0)
    torch.set_num_threads(min(16, os.cpu_count() or 1))
    sys.path[:0] = [str(ROOT / name) for name in ("benchmarks", "tests", "examples")]
    report = Report(options.results, torch.cuda.get_device_name(), options.budget)
    for line in facts():
        report.say(line)
    begin = time.perf_counter()
    run(report, options)
    for text in report.dropped:
        report.say(f"not done: {text}")
    for text in report.failed:
        report.say(f"FAILED {text}")
    verdict = f"{len(report.failed)} FAILED" if report.failed else "no check failed"
    report.say(f"{verdict}, {len(report.dropped)} not done, {time.perf_counter() - begin:.0f} s")
    print(f"report: {report.path}")
    raise SystemExit(1 if report.failed else 0)


if __name__ == "__main__":
    main()
