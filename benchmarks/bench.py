"""All benchmarks of zerocore on CPU ranks beside its peers, as one table.

    python benchmarks/bench.py --quick           # under 3 minutes
    python benchmarks/bench.py                   # what benchmarks/results/ has

Each benchmark is a program of its own and can be run alone with the same options: what one leaves
in a process (process groups, pools, peak memory) cannot touch another.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

from table import Row, print_table, where

PROGRAMS = ("bench_step", "bench_host", "bench_shard", "bench_ops", "bench_optimizer")


def rows_of(program: str, quick: bool, folder: str) -> list[Row]:
    """Runs one benchmark.

    Raises:
        SystemExit: if it fails; it has said why.
    """
    path = pathlib.Path(__file__).with_name(f"{program}.py")
    result = pathlib.Path(folder, f"{program}.json")
    command = [sys.executable, str(path), "--json", str(result)] + ["--quick"] * quick
    done = subprocess.run(command, stdout=subprocess.DEVNULL)
    if done.returncode != 0:
        raise SystemExit(f"{program}: expected it to end well, got status {done.returncode}")
    return [Row(**row) for row in json.loads(result.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    options = parser.parse_args()
    print(where(), flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for program in PROGRAMS:
            print(f"{program} ...", file=sys.stderr, flush=True)
            rows += rows_of(program, options.quick, folder)
    print_table(rows)


if __name__ == "__main__":
    main()
