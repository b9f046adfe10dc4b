"""The command line: `python -m zerocore COMMAND`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from zerocore import env
from zerocore.numerals import count
from zerocore.tracing import command as trace

SECONDS = 2.0  # between two lines about progress


def run_env(options: argparse.Namespace) -> int:
    """Prints what was built, found, chosen and is missing; 1 if zerocore cannot be used at all."""
    build, machine = env.find_build(), env.find_machine()
    broken = isinstance(build, str)
    choice = env.find_choice()
    print(env.report(build, machine, choice, env.problems(build, machine)))
    return 1 if broken else 0


def run_export(options: argparse.Namespace) -> int:
    """Writes a checkpoint's model to files of another format."""
    from zerocore import convert  # takes a second to import

    shard_bytes = options.shard_bytes
    if shard_bytes is None and options.out.endswith(os.sep):
        shard_bytes = convert.SHARD_BYTES
    return _convert(
        "export",
        lambda **tell: convert.export_checkpoint(
            options.directory,
            Path(options.out),
            shard_bytes=shard_bytes,
            dtype=options.dtype and convert.DTYPES[options.dtype],
            optimizer=options.optimizer,
            force=options.force,
            **tell,
        ),
    )


def run_import(options: argparse.Namespace) -> int:
    """Writes weights of another format to a checkpoint directory."""
    from zerocore import convert  # takes a second to import

    return _convert(
        "import",
        lambda **tell: convert.import_checkpoint(
            options.source,
            options.directory,
            dtype=options.dtype and convert.DTYPES[options.dtype],
            prefix=options.prefix,
            strip_prefix=options.strip_prefix,
            **tell,
        ),
    )


def _convert(name: str, run: Callable[..., None]) -> int:
    """0, 1 if it failed, 2 if it could not begin: errors, notes and progress go to stderr."""
    # A signal that ends the process at once would leave unfinished files behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    start = shown = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= SECONDS:
            shown = now
            rate = done / (now - start) / 1e6
            _say(name, f"{done / 1e9:.2f} of {total / 1e9:.2f} GB, {rate:.0f} MB/s")

    try:
        run(note=lambda text: _say(name, text), progress=progress)
    except (ValueError, FileExistsError) as error:
        _say(name, error)
        return 2
    except (RuntimeError, OSError) as error:
        _say(name, error)
        return 1
    except KeyboardInterrupt:
        _say(name, "interrupted")
        return 128 + signal.SIGINT
    return 0


def _say(name: str, text: object) -> None:
    print(f"zerocore {name}: {text}", file=sys.stderr, flush=True)


def run_diagnose(options: argparse.Namespace) -> int:
    """Prints where the ranks that logged to a folder part; 0 if they do not, 2 without logs."""
    from zerocore.diagnosis import first_divergence, is_well
    from zerocore.logfile import read_states

    try:
        states = read_states(Path(options.folder))
    except ValueError as error:
        print(f"zerocore diagnose: {error}", file=sys.stderr)
        return 2
    if is_well(states):
        print(f"zerocore: all {len(states)} ranks ended by themselves; none waited for another one")
        return 0
    print(first_divergence(states))
    return 1


def parser() -> argparse.ArgumentParser:
    """One subcommand each; `run` is its function, which returns the exit status."""
    result = argparse.ArgumentParser(prog="python -m zerocore", description="zerocore's commands.")
    commands = result.add_subparsers(metavar="COMMAND", required=True)
    about = "what zerocore was built for, what this machine has, and what is missing"
    command = commands.add_parser("env", help=about, description=f"Prints {about}.")
    command.set_defaults(run=run_env)
    _add_export(commands)
    _add_import(commands)
    about = "where ranks part first, from the logs that they wrote to ZEROCORE_LOG_DIR"
    command = commands.add_parser("diagnose", help=about, description=f"Prints {about}.")
    command.add_argument("folder", metavar="DIR", help="with rank0.jsonl and so on")
    command.set_defaults(run=run_diagnose)
    trace.add(commands)
    if "zerocore._C" in sys.modules:  # without the extension `env` still tells why
        from zerocore.planner import command as plan

        plan.add(commands)
    return result


def _add_export(commands: argparse._SubParsersAction) -> None:
    about = "a checkpoint's model as a safetensors or torch.save file"
    command = commands.add_parser("export", help=about, description=f"Writes {about}.")
    command.set_defaults(run=run_export)
    add = command.add_argument
    add(
        "directory",
        type=Path,
        metavar="DIR",
        help="the checkpoint, of torch.distributed.checkpoint",
    )
    out = "FILE.safetensors; FILE.pt for torch.load; FOLDER/ for Hugging Face's from_pretrained"
    add("out", metavar="OUT", help=out)
    _add_dtype(command)
    add("--optimizer", action="store_true", help="FILE.pt holds {'model': ..., 'optim': ...}")
    shard = "OUT is a folder, of files with at most N bytes of tensors (FOLDER/: 5e9)"
    add("--shard-bytes", type=count, metavar="N", help=shard)
    add("--force", action="store_true", help="replace OUT if it exists")


def _add_import(commands: argparse._SubParsersAction) -> None:
    about = "a checkpoint directory from weights in other files"
    command = commands.add_parser("import", help=about, description=f"Writes {about}.")
    command.set_defaults(run=run_import)
    add = command.add_argument
    source = "FILE.safetensors; FILE.pt or FILE.bin with a state dict; a folder of Hugging Face"
    add("source", type=Path, metavar="SOURCE", help=source)
    add("directory", type=Path, metavar="DIR", help="the checkpoint, a new directory")
    _add_dtype(command)
    add("--strip-prefix", default="", metavar="P", help="take P off the names that begin with it")
    add("--prefix", default="", metavar="P", help="put P in front of the names")


def _add_dtype(command: argparse.ArgumentParser) -> None:
    about = "of the model's tensors of floating point, if not their own"
    command.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help=about)


def main(arguments: list[str] | None = None) -> int:
    """Runs one command."""
    options = parser().parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
